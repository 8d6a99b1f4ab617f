"""Identity, roster, policy, ledger: the mechanisms that a data-protection officer relies on."""
