"""Training on real text, on one process and on ranks: `shardproof train`."""
