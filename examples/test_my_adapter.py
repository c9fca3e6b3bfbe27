"""The same layer in your own test run: `pytest examples/test_my_adapter.py`."""

from hypothesis import given, settings
from my_adapter import Mine

from harness import cases, check
from harness.draws import register


@settings(max_examples=50, deadline=None, backend=register())
@given(case=cases("linear", Mine))
def test_my_layer_computes_what_one_process_computes(case):
    check("linear", Mine, case)
