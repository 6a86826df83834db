"""Every region of every plan has a definition by the real nvFuser: what Thunder alone can run, plans can too."""

import pytest

from tests.with_nvfuser.definitions import defined, defined_in_loops, planned
from tests.with_nvfuser.programs import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_nvfuser_defines_all_regions(name):
    program = PROGRAMS[name]
    try:
        traces, _ = planned(program, plain=False)
        regions = sum(map(defined, traces))
    except Exception:
        try:
            sum(map(defined, planned(program, plain=True)[0]))
        except Exception as error:
            pytest.skip(f"Thunder alone fails on it: {type(error).__name__}: {error}")
        raise
    assert regions and sum(map(defined_in_loops, traces)) >= program.loops
