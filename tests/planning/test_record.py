"""What is kept of a compilation."""

from types import SimpleNamespace

from thunder.core.compile_data import compile_data_and_stats

from thunder_mem.planning.record import note_program, noted_program


def test_the_program_in_compilation_has_a_digest_once_it_is_noted():
    with compile_data_and_stats(None, SimpleNamespace()):
        assert noted_program() == ""
        note_program({"digest": "0123", "operations": 4}, {})
        assert noted_program() == "0123"
