#!/usr/bin/env bash
# Makes .venv at the repository's root: finds a Python that really runs, installs requirements.txt and this project
# (editable). A second call with unchanged requirements returns at once, and an interrupted one is finished by the next.
#
#   tools/bootstrap.sh                 make or update .venv
#   tools/bootstrap.sh --find-python   print the interpreter that .venv would be made with
#
# PYTHON=/path/to/python takes that interpreter and no other. Up to the first install only bash itself is needed.
set -euo pipefail

here=${BASH_SOURCE[0]}
case $here in */*) here=${here%/*} ;; *) here=. ;; esac
root=$(cd "$here/.." && pwd -P)
venv=$root/.venv
requirements=$root/requirements.txt
stamp=$venv/requirements.installed # a copy of what was installed; written last

say() { printf '%s\n' "$*" >&2; }

# megatron-core has wheels for 3.12 and 3.13 only. An interpreter without these modules cannot make a venv, or cannot use it.
probe='
import sys
if not (3, 12) <= sys.version_info[:2] < (3, 14):
    sys.exit("it is Python %d.%d" % tuple(sys.version_info[:2]))
try:
    import ctypes, ensurepip, ssl, venv
except ImportError as error:
    sys.exit("%s (on Debian and Ubuntu: install python%d.%d-venv)" % (error, sys.version_info[0], sys.version_info[1]))
'
why=    # why the last interpreter is unfit
tried=  # every unfit interpreter and its reason, one a line

# A pyenv shim exists for versions that are not selected, and fails when called: only running it tells.
fit() {
    if why=$("$1" -c "$probe" 2>&1); then return 0; fi
    why=${why%%$'\n'*}
    tried+="  $1: ${why:-it does not run}"$'\n'
    return 1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        if fit "$PYTHON"; then type -P "$PYTHON" && return 0; fi
        say "PYTHON=$PYTHON cannot be used: ${why:-it does not run}."
        say "Expected a Python 3.12 or 3.13 with venv. Set PYTHON to one, or unset it to have one looked for."
        return 1
    fi

    local name candidate
    while IFS= read -r candidate; do
        if [ -x "$candidate" ] && fit "$candidate"; then printf '%s\n' "$candidate"; return 0; fi
    done < <(
        for name in python3.12 python3.13 python3; do type -aP "$name" || true; done
        for name in 3.12 3.13; do printf '%s\n' "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$name".*/bin/python; done
    )

    if type -P uv >/dev/null; then
        if candidate=$(uv python find '>=3.12,<3.14' 2>/dev/null) && fit "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
        say "No Python 3.12 or 3.13 here: uv installs one."
        if uv python install 3.12 >&2 && candidate=$(uv python find 3.12) && fit "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    fi

    say "No usable Python found: 3.12 or 3.13 with venv is needed."
    if [ -n "$tried" ]; then say "Tried:"; printf '%s' "$tried" >&2; fi
    say "Install one, then run the command again:"
    say "  Debian, Ubuntu:  sudo apt install python3.12 python3.12-venv   (or python3.13, whichever the release has)"
    say "  macOS:           brew install python@3.12"
    say "  uv:              uv python install 3.12"
    say "  pyenv:           pyenv install 3.12"
    say "One that lies elsewhere: PYTHON=/path/to/python3.12 make train"
    return 1
}

# The path of a venv is written into its scripts: one that was moved is of no use, nor one whose making was cut off.
in_place() {
    local activate=
    if [ -f "$venv/bin/activate" ]; then activate=$(<"$venv/bin/activate"); fi
    [[ $activate == *"$venv"* ]]
}

if [ "${1:-}" = --find-python ]; then find_python; exit; fi
if [ $# -gt 0 ]; then say "usage: $0 [--find-python]"; exit 2; fi

if [ -f "$stamp" ] && [ "$(<"$stamp")" = "$(<"$requirements")" ] && in_place && "$venv/bin/python" -S -c '' 2>/dev/null
then
    exit 0
fi

if ! { in_place && fit "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    if [ -e "$venv" ]; then
        say "$venv cannot be used (${why:-moved, or not finished}): making it anew."
        rm -rf "$venv"
    fi
    tried=
    python=$(find_python)
    say "Making .venv with $python"
    "$python" -m venv "$venv"
fi

# pip takes a package for installed once its metadata is there, and writes INSTALLER after all else: metadata without it
# is a package whose installation was cut off.
for metadata in "$venv"/lib/python*/site-packages/*.dist-info; do
    if [ -d "$metadata" ] && [ ! -f "$metadata/INSTALLER" ]; then
        say "Installing again what was cut off: ${metadata##*/}"
        rm -rf "$metadata"
    fi
done

rm -f "$stamp"
say "Installing requirements.txt: about 5 GB on Linux, most of it PyTorch, and only once. After the downloads pip unpacks"
say "for a minute or more without a sign of life."
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$venv/bin/python" -m pip install -r "$requirements"
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable "$root"
cp "$requirements" "$stamp"
say "Ready: .venv/bin/python"
