"""Hypothesis profiles. `dev` by default, `ci` where the variable CI is set, or HYPOTHESIS_PROFILE=nightly."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck

from harness.draws import register

# Ranks of a case start processes and wait for each other: how long an example takes says nothing about the code.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "backend": register()}

hypothesis.settings.register_profile("dev", max_examples=30, **COMMON)
hypothesis.settings.register_profile("ci", max_examples=25, derandomize=True, print_blob=True, **COMMON)
hypothesis.settings.register_profile("nightly", max_examples=2000, print_blob=True, **COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# Ranks import the functions of these files by name.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "harness")]
