"""The ledgers of what left a silo and what arrived: records, rules, audits."""
