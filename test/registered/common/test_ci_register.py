"""Registration is read from the source: each way of getting it wrong is an error that names the file and the cause."""

import sys
import textwrap
from pathlib import Path

import pytest

from common import ci_register
from common.ci_register import RegistrationError, find_registrations, read_registrations, register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

MAIN = 'if __name__ == "__main__":\n    pass\n'


def write(folder: Path, text: str | bytes, name: str = "test_it.py") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
    return path


def test_markers_are_no_ops_of_upstreams_signature():
    for backend in ("cpu", "cuda", "amd", "npu", "xpu"):
        marker = getattr(ci_register, f"register_{backend}_ci")
        assert marker(1.5, "any", True, "why", stage="a", runner_config="b") is None


def test_reads_every_argument_without_running_the_file(tmp_path):
    source = 'raise SystemExit\nregister_cpu_ci(7, "base-a-test-cpu", True, disabled="slow", stage="a")\n'
    (one,) = read_registrations(write(tmp_path, source + MAIN))
    assert (one.backend, one.suite, one.est_time, one.nightly) == ("cpu", "base-a-test-cpu", 7, True)
    assert (one.disabled, one.stage, one.runner_config) == ("slow", "a", None)


def test_a_file_may_carry_several_backends(tmp_path):
    source = (
        'register_cpu_ci(est_time=1, suite="base-a-test-cpu")\n'
        'ci_register.register_cuda_ci(est_time=2, suite="base-a-test-1-gpu")\n'
    )
    assert [r.backend for r in read_registrations(write(tmp_path, source + MAIN))] == ["cpu", "cuda"]


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (MAIN, "no registration"),
        ('# register_cpu_ci(est_time=1, suite="base-a-test-cpu")\n' + MAIN, "no registration"),
        ('register_cpu_ci(est_time=1, suite="base-a-test-cpu")\n', "__main__"),
        ('register_cpu_ci(est_time=SECONDS, suite="base-a-test-cpu")\n' + MAIN, "est_time is `SECONDS`"),
        ('register_cpu_ci(est_time=1, suite="base-b-test-cpu")\n' + MAIN, "known for cpu: base-a-test-cpu"),
        ('register_npu_ci(est_time=1, suite="base-a-test-cpu")\n' + MAIN, "known for npu: none"),
        ('register_cpu_ci(suite="base-a-test-cpu")\n' + MAIN, "est_time is missing"),
        ("register_cpu_ci(est_time=1)\n" + MAIN, "suite is missing"),
        ('register_cpu_ci(est_time="long", suite="base-a-test-cpu")\n' + MAIN, "est_time is 'long'"),
        ('register_cpu_ci(est_time=0, suite="base-a-test-cpu")\n' + MAIN, "above 0"),
        ('register_cpu_ci(1, "base-a-test-cpu", nightly=1)\n' + MAIN, "nightly is 1"),
        ('register_cpu_ci(1, "base-a-test-cpu", disabled=True)\n' + MAIN, "disabled is True"),
        ('register_cpu_ci(1, "base-a-test-cpu", speed=3)\n' + MAIN, "'speed'"),
        ('register_cpu_ci(1, "base-a-test-cpu", False, None, "a")\n' + MAIN, "5 positional"),
        ('register_cpu_ci(est_time=1e999, suite="base-a-test-cpu")\n' + MAIN, "est_time is inf; expected seconds"),
        ('register_cpu_ci(est_time=True, suite="base-a-test-cpu")\n' + MAIN, "est_time is True; expected float"),
        ('register_cpu_ci(est_time=[1], suite="base-a-test-cpu")\n' + MAIN, "est_time is [1]; expected float"),
        (
            'register_cpu_ci(est_time={[]: 1}, suite="base-a-test-cpu")\n' + MAIN,
            "est_time is `{[]: 1}`; expected a constant",
        ),
        ("register_cpu_ci(est_time=1, suite={{}})\n" + MAIN, "suite is `{{}}`; expected a constant"),
        (
            'register_cpu_ci(est_time=1, suite=["base-a-test-cpu"])\n' + MAIN,
            "suite is ['base-a-test-cpu']; expected str",
        ),
        (
            'register_cpu_ci(*(1, "base-a-test-cpu"))\n' + MAIN,
            "est_time is `*(1, 'base-a-test-cpu')`; expected a constant",
        ),
        ('register_cpu_ci(**{"est_time": 1})\n' + MAIN, "argument None; expected each of est_time"),
        ('register_cpu_ci(1, "base-a-test-cpu", stage=3)\n' + MAIN, "stage is 3; expected a string or None"),
        ("def broken(:\n", "cannot be parsed: invalid syntax"),
        ("x = 'a\0b'\n" + MAIN, "null bytes"),
        (b"# caf\xe9\n" + MAIN.encode(), "expected Python source, in UTF-8"),
        (MAIN.encode() + b"# caf\xe9\n", "expected Python source, in UTF-8"),  # Python looks at the first lines apart
    ],
)
def test_each_mistake_is_named(tmp_path, source, cause):
    path = write(tmp_path, source)
    with pytest.raises(RegistrationError) as caught:
        read_registrations(path)
    assert str(path) in str(caught.value) and cause in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\nname = 'caf\xe9'\n"])
def test_what_python_can_read_is_read(tmp_path, start):
    source = start + b'register_cpu_ci(1, "base-a-test-cpu")\n' + MAIN.encode()
    (one,) = read_registrations(write(tmp_path, source))
    assert one.est_time == 1


def test_what_is_no_file_is_named(tmp_path):
    (tmp_path / "test_folder.py").mkdir()
    (tmp_path / "test_gone.py").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RegistrationError) as caught:
        find_registrations(tmp_path)
    for line, name in zip(str(caught.value).splitlines(), ("test_folder.py", "test_gone.py"), strict=True):
        assert line.startswith(f"{tmp_path / name}: cannot be read: ") and line.endswith("expected a file")


def test_all_mistakes_of_a_folder_are_reported_together(tmp_path):
    write(tmp_path, MAIN, "test_a.py")
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep", "x = 1\n", "test_b.py")
    write(tmp_path, "x = 1\n", "helper.py")  # not a test file
    with pytest.raises(RegistrationError) as caught:
        find_registrations(tmp_path)
    assert len(str(caught.value).splitlines()) == 2


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
