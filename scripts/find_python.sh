#!/usr/bin/env bash
# Print the path of a Python that starts: `default` (3.11 or later, 3.11 preferred) or `newest` (the newest from 3.12).
#
# Looks on PATH and among pyenv's versions. Starts each candidate, because a pyenv shim may exist for a version that pyenv
# does not run.
set -euo pipefail

pyenv_root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || true)}
pyenv_root=${pyenv_root:-$HOME/.pyenv}

# All paths that could be the command $1, one a line.
paths_of() {
    type -aP "$1" || true
    compgen -G "$pyenv_root/versions/*/bin/$1" || true
}

# A system's Python may come without what `python -m venv` needs; uv does without it.
venv_needs=ensurepip
if command -v uv >/dev/null; then venv_needs=sys; fi

# Whether $1 starts, is Python 3.$2 or later, and can make a virtual environment.
is_python() {
    "$1" -c "import sys, $venv_needs; sys.exit(sys.version_info < (3, $2))" </dev/null >/dev/null 2>&1
}

first_of() {
    local oldest=$1 name path
    shift
    for name in "$@"; do
        while read -r path; do
            if is_python "$path" "$oldest"; then
                echo "$path"
                exit 0
            fi
        done < <(paths_of "$name")
    done
}

case "${1-}" in
default)
    first_of 11 python3.11 python3 python python3.1{9..2}
    echo "No Python 3.11 or later (with its venv module) was found: install one, or name it with PYTHON=/path/to/python3." >&2
    exit 1
    ;;
newest)
    first_of 12 python3.{19..12}
    echo "No Python 3.12 or later was found." >&2
    exit 1
    ;;
*)
    echo "usage: $0 default|newest" >&2
    exit 2
    ;;
esac
