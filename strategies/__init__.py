"""Hypothesis strategies that draw cases. They draw small integers and choices only, so that shrinking is fast."""
