#!/usr/bin/env bash
# A coordinator and four hospitals on this machine, with the keys, files and processes that they would have on machines
# of their own; hospital-1 to hospital-4 hold folders of made-up patients.
#
#     ./federation.sh FOLDER [blind.toml | private.toml]
#
# The job is job.toml, followed by the file that is named. Everything lies in FOLDER, which must not exist.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
more=${2:+$(realpath "$2")}
silos=(hospital-1 hospital-2 hospital-3 hospital-4)
mkdir -p "$(dirname "$1")"
mkdir "$1"
cd "$1"

# 1. Keys, of which only the public half travels; the founder signs who takes part.
staddle keys new founder     --role founder     --organisation "Ministry"   --out founder > /dev/null
staddle keys new operator    --role operator    --organisation "University" --out operator > /dev/null
staddle keys new coordinator --role coordinator --organisation "University" --out coordinator/keys > /dev/null
for silo in "${silos[@]}"; do
  staddle keys new "$silo" --role silo --organisation "$silo" --out "$silo/keys" > /dev/null
done
staddle roster new --federation lung --founder founder/entry.json --threshold 1 --out roster.json
for member in operator coordinator/keys "${silos[@]/%//keys}"; do
  staddle roster add roster.json "$member/entry.json" > /dev/null
done
staddle roster sign roster.json --keys founder
pin=$(staddle keys show founder | sed -n 's/^protocol key *//p')
trust=$(printf '[trust]\nfederation = "lung"\nfounders = ["%s"]\nthreshold = 1\n' "$pin")

# 2. The operator signs the job, with the digest of the package whose code it runs.
cat "$here/job.toml" ${more:+"$more"} > job.toml
staddle job sign job.toml --keys operator --roster roster.json --out job.json

# 3. The coordinator; a free port, which its log names.
cat > coordinator/coordinator.toml <<TOML
version = 1
listen = "127.0.0.1:0"
directory = "state"
keys = "keys"
roster = "../roster.json"
packages = ["lung"]

$trust
TOML
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
staddle coordinator run --config coordinator/coordinator.toml > coordinator/log 2>&1 &
until grep -q listening coordinator/log; do
  kill -0 $! 2> /dev/null || { cat coordinator/log; exit 1; }
  sleep 0.2
done
port=$(sed -n 's/.*listening.*address=[^ ]*:\([0-9]*\).*/\1/p' coordinator/log)

# 4. Each hospital: its records, what may leave, whose code may run. All four draft the same policy, so it is drafted
#    once here.
staddle policy new job.json --roster roster.json --package lung --out policy.toml
for silo in "${silos[@]}"; do
  python -m lung.phantoms "$silo/scans" --hospital "${silo#hospital-}"
  cp policy.toml "$silo/policy.toml"
  cat > "$silo/silo.toml" <<TOML
version = 1
coordinator = "localhost:$port"
directory = "state"
keys = "keys"
roster = "../roster.json"
policy = "policy.toml"

$trust

[data]
kind = "package"
name = "lung-scans"
folder = "scans"
lazy = true
workers = 1
TOML
done

for silo in "${silos[@]}"; do
  staddle silo run --config "$silo/silo.toml" > "$silo/log" 2>&1 &
done

cat > operator.toml <<TOML
version = 1
coordinator = "localhost:$port"
keys = "operator"
roster = "roster.json"

$trust
TOML
staddle job submit job.json --operator operator.toml
staddle job watch lung --operator operator.toml

# All that is still running: the coordinator and the agents.
kill $(jobs -p) && wait || true

# 5. What left, and what the models are worth.
for silo in "${silos[@]}"; do
  staddle ledger verify "$silo/state" --silo "$silo" --roster roster.json --founder "$pin"
done
staddle ledger summary hospital-1/state --roster roster.json --founder "$pin"
staddle status --config hospital-1/silo.toml
