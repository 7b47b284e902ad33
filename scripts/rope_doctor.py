"""Is the RoPE of a checkpoint right? Loads a local folder the way its library does, checks, and says so.

Exit status: 0 right, 1 something wrong, 2 could not be checked.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

from common.rope_doctor import Report, check_model, repair_model

RIGHT, WRONG, UNCHECKED = range(3)


class CannotLoad(Exception):
    """The folder could not be loaded; the message says why."""


def load(folder: Path, trust_remote_code: bool):
    """The models of a checkpoint folder, by name, as transformers or diffusers load them."""
    if not folder.is_dir():
        raise CannotLoad(f"{folder} is not a folder")
    index, config = folder / "model_index.json", folder / "config.json"
    if index.exists():
        from diffusers import DiffusionPipeline

        parts = json.loads(index.read_text(encoding="utf-8"))
        absent = {name: None for name, part in parts.items() if part == [None, None]}  # else its loader wants them
        pipeline = DiffusionPipeline.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code, **absent
        )
        return {name: part for name, part in pipeline.components.items() if hasattr(part, "named_modules")}
    if not config.exists():
        raise CannotLoad(f"{folder} holds neither config.json nor model_index.json")
    written = json.loads(config.read_text(encoding="utf-8"))
    if "_class_name" in written:
        import diffusers

        kind = getattr(diffusers, written["_class_name"], None)
        if kind is None:
            raise CannotLoad(f"the installed diffusers has no class {written['_class_name']!r}")
        return {written["_class_name"]: kind.from_pretrained(folder, local_files_only=True)}
    import transformers

    names = written.get("architectures") or []
    kind = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if kind is None or written.get("auto_map"):
        keys = written.get("auto_map", {})
        auto = next((key for key in keys if key.startswith("AutoModel")), "AutoModel")
        kind = getattr(transformers, auto, transformers.AutoModel)
        return {auto: kind.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)}
    return {kind.__name__: kind.from_pretrained(folder, local_files_only=True)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=__doc__.splitlines()[2])
    parser.add_argument("path", type=Path, help="folder of a checkpoint")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model code that the folder brings")
    parser.add_argument("--repair-check", action="store_true", help="repair in memory, and check again")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    before, repaired, after = {}, {}, {}
    try:
        with redirect_stdout(sys.stderr):  # whatever a library or a model's code prints is no part of the report
            for name, model in load(options.path, options.trust_remote_code).items():
                before[name] = check_model(model)
                if options.repair_check:
                    repaired[name] = repair_model(model)
                    after[name] = check_model(model)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code may raise anything; it is all one to the caller
        message = f"{options.path} could not be checked: {error}"
        print(json.dumps({"verdict": "unchecked", "error": message}) if options.json else message)
        return UNCHECKED
    if options.json:
        parts = {"found": before, "repaired": repaired, "after": after}
        print(json.dumps({k: {n: r.to_dict() for n, r in v.items()} for k, v in parts.items() if v}, indent=2))
    else:
        for title, reports in (("", before), ("repaired ", repaired), ("after the repair ", after)):
            for name, report in reports.items():
                print(f"{title}{name}\n{report}")
    return status(list((after or before).values()))


def status(reports: list[Report]) -> int:
    verdicts = {report.verdict for report in reports if report.findings or report.computed}
    if "wrong" in verdicts:
        return WRONG
    return RIGHT if verdicts == {"right"} else UNCHECKED


if __name__ == "__main__":
    sys.exit(main())
