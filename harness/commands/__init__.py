"""The commands of ``shardproof``, a file each. Imports are inside them, so that each starts fast."""
