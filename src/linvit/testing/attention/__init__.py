"""The contract of attention mechanisms, one file per group of clauses."""
