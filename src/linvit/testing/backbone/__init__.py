"""The contract of backbones, one file per group of clauses."""
