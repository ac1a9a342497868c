"""The processes of tests themselves."""

import textwrap

import pytest
import warm


def imported():
    import sys

    return "transformers.models.llama.modeling_llama" in sys.modules


@pytest.mark.spawns
def test_ranks_are_forked_from_a_process_that_has_imported_what_they_need(run_ranks):
    """Each would import it for ten seconds otherwise, in hundreds of tests, and none of them would fail."""
    assert run_ranks(imported, world_size=2) == [True, True]


ENDS = {
    "threads, then functions, then objects": (
        """
        import atexit, threading, time
        class Held:
            def __del__(self):
                print("freed", flush=True)
        held = Held()
        atexit.register(print, "called")
        threading.Thread(target=lambda: (time.sleep(0.3), print("joined"))).start()
        """,
        "joined\ncalled\nfreed",
    ),
    "a code": ("import sys; sys.exit(65)", "exit code 65"),
    "a text": ("import sys; sys.exit('no way')", "no way"),
    "an exception": ("def f():\n    raise ValueError('it broke')\nf()", "ValueError: it broke"),
}


@pytest.mark.spawns
@pytest.mark.parametrize(("program", "said"), ENDS.values(), ids=ENDS)
def test_a_process_of_the_template_ends_as_others_do(program, said, tmp_path):
    """Its modules are not freed: that would take most of the time of a short job."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    code, text = warm.run(["--nproc-per-node", "1", path], 240)
    assert code == (0 if "freed" in said else 1), text
    assert said in text


@pytest.mark.spawns
def test_a_command_of_the_template_says_what_it_says_and_ends_as_a_command(tmp_path):
    code, output, errors = warm.hyperpod(["preset", "show", "nothing"], 240)
    assert (code, output) == (2, "")
    assert "nothing" in errors
    assert warm.hyperpod(["preset", "list"], 240)[::2] == (0, "")
