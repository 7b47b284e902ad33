"""Run a suite of registered test files, each in a process of its own, and count their test cases.

Only the standard library is needed to list and to check; running a file needs what the file imports.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.ci_register import SUITES, Registration, RegistrationError, find_registrations  # noqa: E402

TESTS = ROOT / "test" / "registered"
SLACK = 30.0  # seconds of a time limit that do not depend on the estimate: starting Python, importing torch
GRACE = 3.0  # seconds that processes have to end by themselves


@dataclass
class Result:
    """What one file's process came to."""

    path: Path
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    cause: str = ""  # why the file failed, where no test case says it
    output: str = ""

    @property
    def ok(self) -> bool:
        return not self.failed and not self.cause


class Processes:
    """The running files' processes, each the leader of a group with all that it starts."""

    def __init__(self) -> None:
        self.stopped = False
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()

    def start(self, command: list[str], **options: Any) -> subprocess.Popen | None:
        """The new process, or None after :meth:`stop`."""
        with self._lock:
            if self.stopped:
                return None
            process = subprocess.Popen(command, start_new_session=True, **options)
            self._running.add(process)
            return process

    def forget(self, process: subprocess.Popen) -> None:
        with self._lock:
            self._running.discard(process)

    def stop(self) -> None:
        """End what is running, and start nothing more."""
        with self._lock:
            self.stopped = True
            end(self._running)


def end(processes: Iterable[subprocess.Popen]) -> None:
    """End the groups that ``processes`` lead: by SIGTERM, at which a runner among them ends its own; whoever is left
    after ``GRACE`` seconds, by SIGKILL."""
    for process in processes:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for process in processes:
        while process.poll() is None or _signal_group(process, 0):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen, number: int) -> bool:
    """Whether somebody is left in the group to get the signal."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # nobody; on some systems, nobody but the dead
        return False
    return True


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def partition(files: list[Registration], size: int) -> list[list[Registration]]:
    """``files`` in ``size`` parts of nearly equal time: the longest first, each to the part with the least so far."""
    parts: list[list[Registration]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for file in sorted(files, key=lambda f: (-f.est_time, str(f.path))):
        least = loads.index(min(loads))
        parts[least].append(file)
        loads[least] += file.est_time
    return parts


def select(files: Iterable[Registration], backend: str, suite: str | None, nightly: bool) -> list[Registration]:
    return [f for f in files if f.backend == backend and suite in (None, f.suite) and (nightly or not f.nightly)]


def once(files: Iterable[Registration]) -> list[Registration]:
    """Each file once, however many suites it is in: by its longest estimate."""
    longest: dict[Path, Registration] = {}
    for file in files:
        known = longest.setdefault(file.path, file)
        if file.est_time > known.est_time:
            longest[file.path] = file
    return list(longest.values())


def run_file(path: Path, limit: float, threads: int, processes: Processes) -> Result:
    """One file by pytest in its own process, ended after ``limit`` seconds."""
    result = Result(path)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(path), "-q", "-rs", f"--junitxml={report}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        with open(Path(folder) / "output", "w+", encoding="utf-8", errors="replace") as output:
            process = processes.start(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            if process is None:
                return Result(path, cause="not run after the runner was stopped")
            try:
                code = process.wait(limit)
                if code not in (0, 1):
                    result.cause = "no test ran" if code == 5 else f"exit status {code}"
            except subprocess.TimeoutExpired:
                end([process])
                code, result.cause = None, f"timed out after {limit:.0f} s"
            finally:
                processes.forget(process)
            output.seek(0)
            result.output = output.read()
        if report.exists():
            for case in ElementTree.parse(report).getroot().iter("testcase"):
                kinds = {child.tag for child in case}
                if kinds & {"failure", "error"}:
                    result.failed += 1
                elif "skipped" in kinds:
                    result.skipped += 1
                else:
                    result.passed += 1
    if code == 1 and not result.failed:
        result.cause = "exit status 1"
    if code == 0 and not result.passed and not result.skipped:
        result.cause = "no test ran"
    result.seconds = time.monotonic() - started
    return result


def run(files: list[Registration], *, jobs: int, limit: float | None, continue_on_error: bool) -> list[Result]:
    """Run each file once, ``jobs`` at a time; after a failure no further file is started unless told so. Interrupted,
    end the running ones with all that they started."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    results: list[Result] = []
    processes = Processes()
    stopped = False

    def one(file: Registration) -> None:
        nonlocal stopped
        if stopped:
            results.append(Result(file.path, cause="not run after an earlier failure"))
            return
        result = run_file(file.path, limit or SLACK + 10 * file.est_time, threads, processes)
        if processes.stopped:
            return
        results.append(result)
        mark = "ok  " if result.ok else "FAIL"
        name = shown(file.path)
        print(
            f"[{len(results)}/{len(files)}] {mark} {name} ({result.seconds:.0f} s, estimated {file.est_time:.0f} s)",
            flush=True,
        )
        if not result.ok:
            print(result.output, flush=True)
            stopped = not continue_on_error

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(one, files))
        except BaseException:
            for number in (signal.SIGINT, signal.SIGTERM):  # a second one would leave what is not ended yet
                signal.signal(number, signal.SIG_IGN)
            processes.stop()
            pool.shutdown(cancel_futures=True)
            raise
    return results


def summary(results: list[Result]) -> str:
    lines = [f"{'file':<70}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>9}"]
    for r in sorted(results, key=lambda r: str(r.path)):
        name = shown(r.path)
        cause = f"  {r.cause}" if r.cause else ""
        lines.append(f"{name:<70}{r.passed:>8}{r.failed:>8}{r.skipped:>8}{r.seconds:>9.1f}{cause}")
    skips = sorted({line for r in results for line in re.findall(r"^SKIPPED .*$", r.output, re.MULTILINE)})
    failed = sum(r.failed or bool(r.cause) for r in results)
    lines += skips
    lines.append(f"{sum(r.passed for r in results)} passed, {failed} failed, {sum(r.skipped for r in results)} skipped")
    return "\n".join(lines)


def seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text}")
    return value


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hw", default="cpu", help="backend (default: cpu)")
    parser.add_argument("--suite", help="suite of that backend; all of them if none is named")
    parser.add_argument("--nightly", action="store_true", help="run the nightly files too")
    parser.add_argument("--auto-partition-id", type=int, help="which part to run, from 0")
    parser.add_argument("--auto-partition-size", type=int, help="how many parts there are")
    parser.add_argument("--continue-on-error", action="store_true", help="go on after a failure")
    parser.add_argument("--timeout-per-file", type=seconds, help="seconds; by default ten times the estimate")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time (default: 1)")
    parser.add_argument("--list", action="store_true", help="list what would run, and stop")
    parser.add_argument("--check", action="store_true", help="check all registrations, and stop")
    parser.add_argument("--tests", type=Path, default=TESTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.hw not in SUITES:
        parser.error(f"unknown backend {options.hw!r}; known: {', '.join(SUITES)}")
    if options.suite is not None and options.suite not in SUITES[options.hw]:
        known = ", ".join(SUITES[options.hw]) or "none yet"
        parser.error(f"unknown suite {options.suite!r} for {options.hw}; known: {known}")
    if (options.auto_partition_id is None) != (options.auto_partition_size is None):
        parser.error("--auto-partition-id and --auto-partition-size go together")
    if options.auto_partition_size is not None and not 0 <= options.auto_partition_id < options.auto_partition_size:
        parser.error(
            f"--auto-partition-id must be in 0..{options.auto_partition_size - 1}, got {options.auto_partition_id}"
        )
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        registered = find_registrations(options.tests)
    except RegistrationError as error:
        print(error, file=sys.stderr)
        return 1
    if options.check:
        print(f"{len({r.path for r in registered})} test files are registered")
        return 0
    chosen = select(registered, options.hw, options.suite, options.nightly)
    files = once(f for f in chosen if f.disabled is None)
    if options.auto_partition_size is not None:
        files = partition(files, options.auto_partition_size)[options.auto_partition_id]
    files.sort(key=lambda f: (-f.est_time, str(f.path)))
    for file in files:
        print(f"{file.est_time:>6.0f} s  {file.suite:<28}{shown(file.path)}")
    for file in chosen:
        if file.disabled is not None:
            print(f"disabled  {shown(file.path)}: {file.disabled}")
    print(f"{len(files)} files, estimated {sum(f.est_time for f in files):.0f} s", flush=True)
    if options.list:
        return 0
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    limit = options.timeout_per_file
    try:
        results = run(files, jobs=options.jobs, limit=limit, continue_on_error=options.continue_on_error)
    except (KeyboardInterrupt, SystemExit) as stop:
        print("stopped; the running tests and what they started were ended", file=sys.stderr)
        return stop.code if isinstance(stop, SystemExit) else 128 + signal.SIGINT
    print(summary(results))
    ran = sum(r.passed + r.failed for r in results)
    if not ran:
        print("no test ran", file=sys.stderr)
    return 0 if ran and all(r.ok for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
