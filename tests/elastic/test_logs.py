"""What agents do with the output of workers when its place fails."""

import io

from hyperpod_plugins.elastic.launcher.logs import ProcessLogs, Sink, Tee


class Broken(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_sink_that_fails_stops_neither_the_others_nor_the_end(tmp_path):
    path, good = tmp_path / "out", io.StringIO()
    path.write_text("one\ntwo\n")
    tee = Tee()
    tee.tail(str(path), "", Sink("stdout", Broken()))
    tee.tail(str(path), "[0]: ", Sink("stdout", good))
    tee.close()
    assert good.getvalue() == "[0]: one\n[0]: two\n"


def logs_in(folder):
    files = {name: str(folder / name) for name in ("stdout", "stderr", "error_file")}
    return ProcessLogs(**files, teed=frozenset({"stdout"}))


def test_a_replacement_gets_a_folder_though_its_predecessors_was_removed(tmp_path):
    logs = logs_in(tmp_path / "gone").of_replacement(2)
    assert logs.stdout == str(tmp_path / "gone" / "incarnation_2" / "stdout")
    assert (tmp_path / "gone" / "incarnation_2").is_dir()


def test_a_replacement_writes_to_the_console_where_no_folder_can_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    logs = logs_in(tmp_path / "file").of_replacement(1)
    assert (logs.stdout, logs.stderr, logs.error_file, logs.teed) == ("", "", "", frozenset())


def test_a_line_that_is_written_in_parts_is_copied_whole(tmp_path):
    """torch's `TailLog` copies each part at once, and what another worker writes meanwhile comes between them."""
    path, out = tmp_path / "out", io.StringIO()
    tee = Tee()
    tee.tail(str(path), "[0]: ", Sink("stdout", out))
    with path.open("w") as file:
        for part, expected in (("one, ", ""), ("two\nthr", "[0]: one, two\n"), ("ee", "[0]: one, two\n")):
            file.write(part)
            file.flush()
            with tee._lock:
                tee._copy_all()
            assert out.getvalue() == expected
    tee.close()
    assert out.getvalue() == "[0]: one, two\n[0]: three\n"
