import copy
from dataclasses import fields

import pytest
from support.refusals import refused

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.exchange.parts import (
    MOST_TENSORS,
    WEIGHT,
    Each,
    Kind,
    Part,
    Sum,
    TensorSpec,
)
from staddle.algorithms.job.job import DERIVED, Job, JobFile
from staddle.algorithms.job.schema import MOST_PHASES, phases
from staddle.algorithms.models.registry import NETWORKS
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.files.documents import canonical_json, parse_json

TEXT = """
version = 1
name = "digits"
seed = 7
purpose = "For a test"
rounds = 10
silos = ["a", "b", "c"]
participation = 0.5

[method]
name = "pfedsim"
options = { rho = 0.35 }

[model]
name = "lenet5"
classes = 10
norm = "batch"

[training]
epochs = 2
lr = 0.1
"""


def read(tmp_path, text=TEXT):
    path = tmp_path / "job.toml"
    path.write_text(text)
    return Job.from_toml(path)


def test_a_job_file_fills_in_its_defaults(tmp_path):
    job = read(tmp_path)
    assert (job.min_cohort, job.round_timeout) == (2, 600.0)
    assert (job.training.batch_size, job.training.momentum) == (32, 0.0)
    assert job.method().name == "pfedsim"
    assert job.method().warmup == 3


def test_a_job_may_take_the_options_of_the_paper(tmp_path):
    """As written they go before, and the document has them as if all had been written."""
    published = {"sampling": "algorithm2", "similarity": "raw", "sketch": 0, "reduction": "sum"}
    method = 'name = "fedaims"\n{}\n[method.options]\nmu = 0.1\nreduction = "mean"'
    text = TEXT.replace('name = "pfedsim"\noptions = { rho = 0.35 }', method)
    text = text.replace('name = "lenet5"', 'name = "convnet-3x64"')
    job = read(tmp_path, text.format("published = true"))
    assert job.method_options.model_dump() == {
        **read(tmp_path, text.format("")).method_options.model_dump(),
        **published, "prototype_weights": "paper_p", "reduction": "mean",
    }  # fmt: skip
    assert "published" not in job.document()["method"]


# What the papers say of each option, and the options that they say nothing of.
PAPERS = {
    "fedsimsup": {"supervisor": ("lenet",), "schedule": "paper", "similarity": "labels",
        "alpha": "eq8", "c": None, "gamma": None},
    "fedssa": {"mu_0": 0.5, "t_stable": 20, "m1": True, "m2": "fuse",
        "stale_inclusive": False, "min_holders": 1,
        "clip": None, "extractors": ()},
    "ppfl": {"variant": "ppfl1", "mixture": "probabilities", "canonical": "linear",
        "schedule": "alternating", "membership_batches": False, "lam": 1e-5, "lam_scale": "literal",
        "weights": "equal", "no_affinity": False, "double_exponential": False},
    "fedaims": {"sampling": "algorithm2", "similarity": "raw", "sketch": 0, "reduction": "sum",
        "prototype_weights": "paper_p", "mu": 1.0, "main_weight": None, "update_gap": 1},
    "pfedsim": {"rho": 0.5, "similarity": "per_class", "self_weight": None},
}  # fmt: skip
UNSAID = {
    # how many silos a round may have at all
    "fedsimsup": {"tau_s", "tau_theta", "cohorts"},
    # memberships are released for people to look at: nothing that is computed depends on it
    "ppfl": {"models", "hidden", "p_theta", "membership_lr", "floor", "release_membership"},
    "fedaims": {"aux_ce"},
}


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_published_sets_every_option_of_which_the_paper_says_something(name):
    published, model = METHODS[name].published, METHODS[name].options_model
    defaults = model().model_dump()
    assert PAPERS[name].keys() | UNSAID.get(name, set()) == defaults.keys()
    assert {key for key, value in published.items() if defaults[key] == value} == set()
    found = model.model_validate(published).model_dump()
    assert {key: found[key] for key in PAPERS[name]} == PAPERS[name]


def test_no_other_method_claims_to_have_a_papers_options(tmp_path):
    with refused(r"job\.toml: method\.published = true: fedper does not say which .* leave publ"):
        read(tmp_path, TEXT.replace('"pfedsim"', '"fedper"\npublished = true'))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("seed = 7", "sed = 7", "unknown key 'sed'; did you mean 'seed'"),
        ("epochs = 2", "epoch = 2", "unknown key 'training.epoch'; did you mean 'epochs'"),
        ("seed = 7", "", "missing key 'seed'"),
        ("version = 1", "version = 2", "version = 2"),
        ("version = 1", "version = true", "version = True: .*give a number"),
        ("seed = 7", "seed = -1", "seed = -1: give 0 or more$"),
        ("seed = 7", f"seed = {2**53}", "seed"),
        ("seed = 7", 'seed = "7"', "seed = '7'"),
        ("rounds = 10", "rounds = 0", "rounds = 0"),
        ("rounds = 10", "rounds = 100001", "rounds = 100001"),
        ("rounds = 10", "rounds = true", "rounds = True: give a whole number$"),
        ("rounds = 10", "rounds = 1.5", "rounds = 1.5: give a whole number$"),
        ("[training]", "[trainin]",
            "missing key 'training'; add it; unknown key 'trainin'; did you mean 'training'"),
        ("[model]", "[[model]]", "model: give a table$"),
        ("rho = 0.35", "roh = 0.35",
            r"\[method.options\] of pfedsim: unknown key 'roh'; did you mean 'rho'"),
        ("rho = 0.35", "rho = 1.35",
            r"\[method.options\] of pfedsim: rho = 1.35: give 1.0 or less$"),
        ("rho = 0.35", 'similarity = "men"', "similarity = 'men': give 'mean' or 'per_class'$"),
        ('norm = "batch"', 'norm = "bach"',
            "model.norm = 'bach': give 'none', 'batch' or 'group'$"),
        ("classes = 10", "classes = 2.0", "model.classes = 2.0: give a whole number$"),
        ("classes = 10", 'classes = 10\nclass_names = "a"',
            "model.class_names = 'a': give a list in brackets$"),
        ("classes = 10", 'classes = 10\nclass_names = ["a"]',
            "model: model.class_names has 1 names, model.classes says 10 classes; give one"),
        ("classes = 10", "classes = 10\ninput = [1, 8, 8]",
            "at least 16 x 16 pixels.*; choose another model"),
        ('"digits"', '"Digits"', "name = 'Digits'"),
        ('"digits"', '"digits\\n"', "name = 'digits"),
        ('"digits"', f'"{"x" * 65}"', "name = "),
        ('["a", "b", "c"]', '["a"]', "silos: give a list of 2 or more, not of 1$"),
        ('["a", "b", "c"]', '["a", 3]', "silos.1 = 3: give a text in quotes$"),
        ('["a", "b", "c"]', '["a", "b", "a"]', "names a more than once"),
        ('["a", "b", "c"]', '["a", "b", "C"]', "silos.2 = 'C'"),
        ("participation = 0.5", "participation = 0", "participation = 0"),
        ("participation = 0.5", "participation = nan", "participation = nan"),
        ("participation = 0.5", "participation = 1.5", "participation = 1.5"),
        ("participation = 0.5", "min_cohort = 4",
            "min_cohort = 4, but there are 3 silos; lower it"),
        ("participation = 0.5", "round_timeout = 0", "round_timeout = 0"),
        ("lr = 0.1", "lr = inf", "training.lr = inf"),
        ("lr = 0.1", "lr = 0.0", "training.lr = 0.0"),
        ("lr = 0.1", "lr = true", "training.lr = True"),
        ("lr = 0.1", "lr = 0.1\nmomentum = 1.0", "training.momentum = 1.0"),
        ("lr = 0.1", "lr = 0.1\nweight_decay = -1", "training.weight_decay = -1"),
        ("epochs = 2", "batch_size = 1", "cannot train with training.batch_size = 1; raise it"),
        ("epochs = 2", "epochs = 0", "training.epochs = 0"),
        ('"pfedsim"', '"pfedsym"', "unknown method 'pfedsym'; did you mean 'pfedsim'"),
        ('"pfedsim"', '"fedavg"', "of fedavg: unknown key 'rho'"),
        ("rho = 0.35", "rh = 0.35",
            r"\[method.options\] of pfedsim: unknown key 'rh'; did you mean 'rho'"),
        ("rho = 0.35", "rho = 1.1", "rho = 1.1"),
        ("rho = 0.35", 'similarity = "max"', "similarity = 'max'"),
        ("rho = 0.35", "self_weight = -1.0", "self_weight = -1.0"),
        ("rho = 0.35", "self_weight = inf", "self_weight = inf"),
        ('name = "pfedsim"', 'name = "pfedsim"\nversion = 9',
            "this silo's pfedsim version differs, it is 1"),
        ('"lenet5"', '"lenet"', "model.name = 'lenet'"),
        ('norm = "batch"', "input = [3, 8, 8]", "at least 16 x 16"),
        ("[training]", "[training", "not valid TOML"),
    ],
)  # fmt: skip
def test_errors_name_file_key_and_value(tmp_path, old, new, complaint):
    assert TEXT.count(old) == 1
    with refused(complaint) as caught:
        read(tmp_path, TEXT.replace(old, new))
    assert str(tmp_path / "job.toml") in str(caught.value)


@pytest.mark.parametrize("method", ["local", "fedavg", "fedper", "pfedsim"])
def test_a_document_goes_round_through_canonical_json(make_job, method):
    job = make_job(method, participation=0.7, training={"lr": 0.1, "weight_decay": 5e-4})
    sent = canonical_json(job.document())
    back = Job.from_document(parse_json(sent, "wire"), "wire", ())
    assert back == job
    assert back.digest == job.digest
    assert canonical_json(back.document()) == sent
    assert job.document()["training"]["lr"] == "0.1"


def test_a_job_that_asks_for_a_data_set_is_another_job(make_job):
    """Its draws, too: sums of two jobs alike would be compared (security rule 35)."""
    plain, asked = make_job(), make_job(dataset="scans")
    assert {**asked.document(), "dataset": None} == {**plain.document(), "dataset": None}
    assert asked.document()["dataset"] == "scans"
    assert plain.for_federation().root != asked.for_federation().root
    assert Job.from_document(asked.document(), "wire", ()).dataset == "scans"
    with pytest.raises(ValueError, match="dataset"):
        make_job(dataset="A B")


def test_a_job_and_its_document_have_every_key_of_the_file(make_job):
    outside = {"start", "packages"}  # of jobs whose model or method is not Staddle's own
    outside |= {"dataset", "purpose", "transport"}  # of jobs that have one
    assert make_job().document().keys() == {*JobFile.model_fields, *DERIVED} - outside
    # not of the file: the method's, how the job came, and where its file of weights lies
    other = {"method_name", "method_options", "federated", "signed_start", "weights_file"}
    own = {field.name for field in fields(Job)} - other
    assert own == JobFile.model_fields.keys() - {"version", "method"}


# ends of lines, control characters, and what turns the direction of a text around
UNSHOWN = "\n\r\x1b\x7f\x85\x9b\u2028\u2029\u202e\u2066"


def test_a_purpose_is_in_the_document_and_one_line(make_job):
    purpose = "Predict the length of stay, for the planning of wards"
    job = make_job(purpose=purpose)
    assert job.document()["purpose"] == purpose
    assert Job.from_document(job.document(), "a job", ()) == job
    assert job.digest != make_job().digest
    broken = ("too short", "x" * 501, " " * 20, "with an end ", *map("two{}lines".format, UNSHOWN))
    for text in broken:
        with pytest.raises(ValueError, match="purpose"):
            make_job(purpose=text)
    make_job(purpose="Πρόβλεψη διάρκειας νοσηλείας — 入院期間の予測")


def test_a_job_file_needs_a_purpose_and_a_simulation_none(make_job, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(TEXT.replace('purpose = "For a test"\n', ""))
    with refused(rf"{path}: purpose is missing, and people at the silos decide by it; say in one"):
        Job.from_toml(path)
    job = make_job()
    assert Job.from_document(job.document(), "a simulation", (), federated=False) == job


def test_the_digest_of_a_job_is_pinned(make_job):
    """A key that a job leaves out may not enter it, or every signed job would be another."""
    pinned = "36e004e5c24734bf3e34e9518ed48686c4bec40b5c94c6c97793a6b9275d14a1"
    assert make_job("fedper").digest == pinned


def test_the_digest_follows_every_choice(make_job):
    jobs = [
        make_job("pfedsim"), make_job("fedavg"), make_job("pfedsim", {"rho": 0.25}),
        make_job("pfedsim", seed=8),
        make_job("pfedsim", silos=["a", "c", "b"]), make_job("pfedsim", model={"norm": "batch"}),
        make_job("pfedsim", training={"lr": 0.2}),
    ]  # fmt: skip
    assert len({job.digest for job in jobs}) == len(jobs)
    same = {job.document()["model_digest"] for job in jobs}
    assert len(same) == 2


def test_the_policy_of_buffers_enters_the_model_digest(make_job):
    jobs = [
        make_job("fedavg", model={"norm": "batch", **buffers})
        for buffers in ({}, {"buffers": "local"}, {"buffers": "global"})
    ]
    local, written, shared = (job.document() for job in jobs)
    assert local == written
    assert local["model"]["buffers"] == "local"
    assert local["model_digest"] != shared["model_digest"]
    names = [[t["name"] for t in d["schema"][0]["up"][0]["tensors"]] for d in (local, shared)]
    assert [any("running" in name for name in each) for each in names] == [False, True]
    back = Job.from_document(parse_json(canonical_json(shared), "wire"), "wire", ())
    assert back.digest == jobs[-1].digest


@pytest.mark.parametrize("method", ["local", "fedssa"])
def test_a_policy_of_buffers_that_would_do_nothing_is_refused(make_job, method):
    with refused(f"model.buffers = 'global', but method '{method}' uploads no running statistics"):
        make_job(method, model={"norm": "batch", "buffers": "global"}).document()
    make_job(method, model={"norm": "batch", "buffers": "local"}).document()


def test_buffers_may_first_cross_after_a_census_or_in_a_late_round(make_job):
    model = {"norm": "batch", "buffers": "global"}
    make_job("fedsimsup", model=model, silos=list("abcd"), participation=0.7, rounds=1).document()
    job = make_job("ppfl", {"schedule": "rbcd", "p_theta": 0.1}, model=model, rounds=40)
    assert [part.name for part in job.up(0)] == ["coupling", "metrics"]
    with refused("in any round"):
        make_job("ppfl", {"schedule": "rbcd", "p_theta": 0.1}, model=model, rounds=1).document()


def test_the_schema_writes_out_what_crosses(tmp_path):
    schema = read(tmp_path).document()["schema"]
    assert [phase["from_round"] for phase in schema] == [0, 3, 4, 10]
    names = [[[p["name"] for p in phase[way]] for way in ("up", "down")] for phase in schema]
    assert names == [
        [["model", "metrics"], ["model"]],
        [["extractor", "rows", "metrics"], ["model"]],
        [["extractor", "rows", "metrics"], ["extractor", "model"]],
        [[], ["extractor", "model"]],
    ]
    model, rows = schema[0]["up"][0], schema[1]["up"][1]
    assert (model["kind"], model["exchange"]) == ("WHOLE_MODEL", "sum.mean")
    bounds = {"least": "0.0", "most": "9007199254740992.0"}
    assert model["tensors"][-1] == {"name": WEIGHT, "dtype": "float64", "shape": [], **bounds}
    assert schema[0]["down"][0]["tensors"] == model["tensors"][:-1]
    tensor = {"name": "rows", "dtype": "float32", "shape": [1, 840]}
    crossing = {"name": "rows", "kind": "CLASSIFIER_ROWS", "exchange": "gram"}
    assert rows == {**crossing, "tensors": [tensor]}
    parts = [part for phase in schema for part in phase["up"] + phase["down"]]
    assert not any("running" in tensor["name"] for part in parts for tensor in part["tensors"])


def tamper(document, *path, value):
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("schema", 0, "up", 0, "tensors", 0, "shape"), [9],
            r"pfedsim version differs \(schema\[0\].up\[0\].tensors\[0\].shape"),
        (("schema", 1, "up", 0, "name"), "weights",
            r"this silo's pfedsim version differs \(schema\[1\]"),
        (("schema",), [], "this silo's pfedsim version differs"),
        (("method_digest",), "00", "this silo's pfedsim version differs"),
        (("model_digest",), "00", "this silo's model cnn-digits differs"),
        (("method", "version"), 2, "this silo's pfedsim version differs, it is 1"),
        (("method", "options", "rho"), "0.50", "key method.options.rho is not written"),
        (("participation",), "1.00", "key participation is not written"),
        (("participation",), "0.x", "participation = '0.x'"),
        (("rounds",), 5, "this silo's pfedsim version differs"),
        (("surprise",), 1, "unknown key 'surprise'"),
    ],
)  # fmt: skip
def test_a_tampered_document_is_refused(make_job, path, value, complaint):
    document = tamper(make_job("pfedsim").document(), *path, value=value)
    with refused(complaint) as caught:
        Job.from_document(document, "from the coordinator", ())
    assert "from the coordinator" in str(caught.value)


def test_a_document_must_be_whole(make_job):
    document = make_job("fedavg").document()
    for key in document:
        with refused("from afar"):
            Job.from_document({k: v for k, v in document.items() if k != key}, "from afar", ())
    with refused("a JSON object"):
        Job.from_document([], "from afar", ())


def test_class_names_are_in_the_document_and_change_nothing_that_crosses(make_job):
    plain, named = make_job("pfedsim"), make_job("pfedsim", model={"class_names": ["a", "b", "ç"]})
    document = parse_json(canonical_json(named.document()), "wire")
    assert document["model"]["class_names"] == ["a", "b", "ç"]
    assert Job.from_document(document, "wire", ()).model.class_names == ("a", "b", "ç")
    assert named.document()["schema"] == plain.document()["schema"]
    assert named.digest != plain.digest
    assert named.digest != make_job("pfedsim", model={"class_names": ["b", "a", "ç"]}).digest


NEED_EXTRACTOR = {"fedas", "fedbabu", "fedpac", "fedper", "fedproto", "fedrep", "fedsimsup"}
NEED_EXTRACTOR |= {"feddbe", "fedgh", "gpfl", "lg-fedavg", "pfedfda", "pfedsim"}
BLOCKS = {"convnet-3x64", "convnet-4x128", "convnet-digits", "resnet18"}


@pytest.mark.parametrize("method", METHODS)
def test_each_method_takes_each_network_or_says_why_not_and_what_to_do(make_job, method):
    fields = {"silos": list("abcd"), "participation": 0.75 if method == "fedsimsup" else 1.0}
    for name, network in NETWORKS.items():
        task = {"kind": "segmentation" if network.dense else "classification"}
        model = {"name": name, "norm": network.norms[0]}
        # a coordinator can keep no hypernetwork of the default width for the largest
        options = {"hidden": 4} if method == "pfedhn" else None
        job = make_job(method, options, model, task=task, **fields)
        if network.dense and METHODS[method].needs_classes:
            with refused(rf"\({method} on {name}\): .* the task is segmentation; methods for any"):
                job.document()
            continue
        lacking = (
            (name == "glm" and method in NEED_EXTRACTOR)
            or (name not in BLOCKS and method == "fedaims")
            or (network.norms[0] == "none" and method == "fedbn")
            # its supervisors are for images, unless the job says otherwise
            or (network.options is not None and method == "fedsimsup")
        )
        if lacking:
            with refused(rf"^job 'test' \({method} on {name}\): .*; choose [^;]*$"):
                job.document()
        else:
            job.document()


@pytest.mark.parametrize("extractor", NETWORKS)
def test_fedssa_takes_each_extractor_or_says_why_not_and_what_to_do(make_job, extractor):
    model = {"name": "digits-cnn-a", "input": [1, 16, 16]}
    job = make_job("fedssa", {"extractors": [extractor]}, model)
    # those that take [1, 16, 16] and have 64 features
    if extractor in {*(f"digits-cnn-{c}" for c in "abc"), "convnet-3x64", "mlp", "tab-resnet"}:
        job.document()
    else:
        where = r"^job 'test' \(fedssa on digits-cnn-a\): fedssa: "
        with refused(rf"{where}extractor '{extractor}' .*; choose [^;]*$"):
            job.document()


def test_a_method_that_never_sends_the_missing_part_takes_the_network(make_job):
    make_job("pfedsim", {"rho": 1.0}, model={"name": "glm"}).document()
    job = make_job("pfedsim", {"rho": 0.5}, model={"name": "glm"})
    with refused("part 'extractor', which crosses in round 2, is empty"):
        job.method()


def test_cohorts_are_drawn_once_for_all_methods_in_job_order(make_job):
    silos = [f"s{i}" for i in range(20)]
    jobs = [make_job(m, silos=silos, participation=0.3, rounds=200) for m in ("local", "pfedsim")]
    cohorts = [jobs[0].cohort(r) for r in range(200)]
    assert cohorts == [jobs[1].cohort(r) for r in range(200)]
    assert all(len(set(c)) == 6 and list(c) == [s for s in silos if s in c] for c in cohorts)
    times = [sum(s in c for c in cohorts) for s in silos]
    assert all(abs(t - 60) < 5 * (200 * 0.3 * 0.7) ** 0.5 for t in times)
    assert make_job(silos=silos, participation=0.3, rounds=200, seed=8).cohort(0) != cohorts[0]


@pytest.mark.parametrize(
    ("share", "fewest", "size"),
    [(1.0, 2, 5), (0.01, 2, 2), (0.5, 2, 3), (0.3, 2, 2), (0.1, 4, 4), (0.7, 1, 4), (0.1, 1, 1)],
)
def test_cohort_sizes_round_half_up(make_job, share, fewest, size):
    assert (
        len(make_job(silos=list("abcde"), participation=share, min_cohort=fewest).cohort(0)) == size
    )


def test_rounds_beyond_the_job_do_not_exist(make_job):
    job = make_job("fedavg", rounds=3)
    assert job.up(2)[-1] is RIGHT
    assert job.up(3) == ()
    assert [part.name for part in job.down(3)] == ["model"]
    for ask in (job.up, job.down, job.cohort):
        for round_ in (-1, 4):
            with refused("rounds 0 to 2"):
                ask(round_)


def test_the_longest_job_is_admitted_quickly(make_job):
    assert len(make_job("pfedsim", rounds=100_000).document()["schema"]) == 4


@pytest.mark.parametrize(
    ("part", "name", "complaint"),
    [
        ("model", "a.b-c_0.weight", ""),
        ("model", "w" * 255, ""),
        ("model", "w" * 256, "255 characters at most"),
        ("model", "a..b", "tensor 'a..b'"),
        ("model", ".a", "tensor '.a'"),
        ("model", "a.b\n", r"tensor 'a.b\\n'"),
        ("model", "w\u0435ight", r"tensor 'w\\u0435ight'"),  # a Cyrillic e
        ("model", "", "tensor ''"),
        ("m\u043edel", "a", r"part 'm\\u043edel'"),
        ("mo del", "a", "part 'mo del'"),
        ("", "a", "part ''"),
        ("m" * 65, "a", "1 to 64"),
    ],
)
def test_names_that_cross_are_what_they_look_like(part, name, complaint):
    parts = (Part(part, Kind.WHOLE_MODEL, Sum("total"), (TensorSpec(name, "float32", (2,)),)),)
    if complaint:
        with refused(complaint):
            phases(1, lambda _: parts, lambda _: ())
        with refused(complaint):
            phases(1, lambda _: (), lambda _: parts)
    else:
        assert len(phases(1, lambda _: parts, lambda _: ())) == 1


def test_no_more_tensors_cross_than_a_manifest_may_have():
    def parts(number):
        specs = tuple(TensorSpec(f"t{i}", "float32", (1,)) for i in range(number))
        return (Part("model", Kind.WHOLE_MODEL, Each(), specs),)

    most = parts(MOST_TENSORS)
    assert len(phases(1, lambda _: most, lambda _: ())) == 1

    more = parts(MOST_TENSORS + 1)
    for up, down in ((more, ()), ((), more)):
        with refused(f"{MOST_TENSORS + 1} tensors cross, at most {MOST_TENSORS} may"):
            phases(1, lambda _, up=up: up, lambda _, down=down: down)


def test_what_crosses_does_not_change_from_round_to_round_for_ever():
    asked = []

    def up(round_):
        asked.append(round_)
        return (one,) * (round_ % 2)

    one = Part("a", Kind.METRIC, Sum("total"), (TensorSpec("t", "float32", (1,)),))
    with refused("what crosses changes for the 256th time"):
        phases(10**9, up, lambda _: ())
    assert len(asked) == MOST_PHASES + 1
