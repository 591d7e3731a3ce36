"""The gate ledger of a model: each verdict with the hash of what it judged."""
