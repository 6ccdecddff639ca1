"""The loader's command line: ``python -m megatron.overlay COMMAND``."""

import argparse
import ast
import difflib
import os
import runpy
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from megatron.overlay import loader, pin
from megatron.overlay.definitions import Source
from megatron.overlay.errors import OverlayError


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m megatron.overlay", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="each layer, what it takes over from the wheel, and why")
    why = commands.add_parser("why", help="where one symbol comes from, and why it is layered")
    why.add_argument("symbol", help="Class, Class.method, function, or with its module in front")
    check = commands.add_parser(
        "check", help="whether every layer fits; exit status 1 if one does not"
    )
    check.add_argument(
        "--against",
        metavar="VERSION_OR_PATH",
        help="a megatron-core version (fetched by pip), a wheel file, or a folder that holds megatron/",
    )
    refresh = commands.add_parser("refresh", help="rewrite upstream.toml from the installed wheel")
    refresh.add_argument(
        "tree", nargs="*", type=Path, help="default: ours and MEGATRON_OVERLAY_PATH's"
    )
    run = commands.add_parser("run", help="install the layers, then run an unmodified script")
    run.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), help="default: the script's --device"
    )
    run.add_argument("script")
    run.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    try:
        return _COMMANDS[options.command](options)
    except OverlayError as error:
        print(f"megatron.overlay: {error}", file=sys.stderr)
        return 1


def _list(options: argparse.Namespace) -> int:
    finder = loader.Finder(loader.trees())
    for root in finder.roots:
        for module, file in sorted(finder.layers_of(root).items()):
            layered = finder.layered(module)
            layer = layered.layer(file)
            symbols = ", ".join(pin.current(layered.stock, layer))
            print(f"{module}\n  layer: {file}\n  takes over: {symbols}")
            print("\n".join(f"  {line}" for line in _why(layer)))
    new = sorted(m for m in finder.files if finder.stock_file(m) is None)
    print(f"new modules: {', '.join(new) or 'none'}")
    return 0


def _why(layer: Source) -> list[str]:
    """The bullets of a layer's docstring."""
    lines = (ast.get_docstring(layer.tree) or "").splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("- ")), 0)
    return lines[first:]


def _explain(options: argparse.Namespace) -> int:
    finder = loader.Finder(loader.trees())
    found, known = False, set()
    for root, one in finder.pins.items():
        for module, file in sorted(finder.layers_of(root).items()):
            stock, layer = finder.layered(module).stock, finder.layered(module).layer(file)
            for symbol in pin.current(stock, layer):
                known.add(symbol)
                if options.symbol not in (symbol, f"{module}.{symbol}"):
                    continue
                found = True
                name = symbol.split(".")[0]
                print(f"{module}.{symbol}")
                print(f"  stock: {stock.path}:{stock.definitions[name].node.lineno}")
                print(f"  layer: {layer.path}:{layer.definitions[name].node.lineno}")
                print(
                    f"  pin:   {one.symbols.get(module, {}).get(symbol, 'none')} of {one.version}"
                )
                print("\n".join(f"  {line}" for line in _why(layer)))
    if not found:
        close = difflib.get_close_matches(options.symbol.split(".")[-1], known, n=3, cutoff=0.4)
        print(
            f"{options.symbol}: no layer takes over a symbol of this name: it is stock, new in this "
            f"fork, or unknown. Layered: {', '.join(close) or 'see list'}"
        )
    return 0 if found else 1


def _check(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        against = _unpacked(options.against, Path(folder)) if options.against else None
        finder = loader.Finder(loader.trees(), against and against / "megatron")
        broken = 0
        for root, one in finder.pins.items():
            if against is None:
                pin.require_environment(one.version)
            for module, file in finder.layers_and_pinned(root).items():
                try:
                    lines = finder.misfits(root, module, file)
                except OverlayError as error:
                    lines = [str(error)]
                broken += bool(lines)
                print(f"{'BROKEN' if lines else 'ok    '} {module}")
                print("".join(f"         {line}\n" for line in lines), end="")
        pinned = {module for one in finder.pins.values() for module in one.symbols}
        for module, files in finder.files.items():
            if module in pinned:
                continue  # reported above
            if not finder.stock_file(module) and "upstream_of(__name__)" in files[0].read_text():
                broken += 1
                print(
                    f"BROKEN {module}\n         {files[0]} is a layer, but the wheel has no such file"
                )
    wheel = options.against or "the installed wheel"
    print(f"{broken} layers do not fit {wheel}" if broken else f"every layer fits {wheel}")
    return 1 if broken else 0


def _unpacked(against: str, folder: Path) -> Path:
    """A folder that holds ``megatron/``, from a folder, a wheel file, or a version fetched by pip."""
    path = Path(against)
    if path.is_dir():
        return path
    if not path.is_file():
        if os.sep in against:
            raise OverlayError(f"--against {against}: there is no such file or folder.")
        wanted = f"{pin.DISTRIBUTION}=={against}"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        result = subprocess.run([*command, wanted], stderr=subprocess.PIPE, text=True)
        if result.returncode:
            raise OverlayError(
                f"--against {against}: neither a path nor a version that pip can fetch.\n"
                + result.stderr.strip().splitlines()[-1]
            )
        path = next(folder.glob("*.whl"))
    zipfile.ZipFile(path).extractall(folder)
    return folder


def _refresh(options: argparse.Namespace) -> int:
    version = pin.installed_version()
    if version is None:
        raise OverlayError(f"{pin.DISTRIBUTION} is not installed: there is nothing to pin.")
    finder = loader.Finder(loader.trees())
    for root in [tree.resolve() for tree in options.tree] or finder.roots:
        if root not in finder.roots:
            raise OverlayError(
                f"{root} is no tree of layers in use: name it in {loader.EXTRA_TREES}."
            )
        fresh = pin.Pin(version)
        for module, file in finder.layers_of(root).items():
            layered = finder.layered(module)
            layered.takers()
            fresh.symbols[module] = pin.current(layered.stock, layered.layer(file))
        fresh.write(loader.pin_of(root))
        count = sum(len(symbols) for symbols in fresh.symbols.values())
        print(f"{loader.pin_of(root)}: {count} symbols of {pin.DISTRIBUTION} {fresh.version}")
    return 0


def _run(options: argparse.Namespace) -> int:
    sys.path.insert(0, str(Path(options.script).resolve().parent))  # as Python itself does
    loader.install(options.device or loader.device_argument(options.args))
    sys.argv = [options.script, *options.args]
    runpy.run_path(options.script, run_name="__main__")
    return 0


_COMMANDS = {"list": _list, "why": _explain, "check": _check, "refresh": _refresh, "run": _run}

if __name__ == "__main__":
    sys.exit(main())
