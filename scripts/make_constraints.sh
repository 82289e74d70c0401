#!/usr/bin/env bash
# Write constraints/py3XX.txt: the newest version of every direct and indirect dependency, for each supported Python.
#
# Needs none of those Pythons.
set -euo pipefail
cd "$(dirname "$0")/.."

pythons=(3.11 3.12 3.13)
uv=$(scripts/find_uv.sh)
for python in "${pythons[@]}"; do
    file=constraints/py${python/./}.txt
    resolved=$(mktemp)
    "$uv" pip compile --quiet --upgrade --all-extras --python-version "$python" --python-platform x86_64-manylinux_2_31 \
        --no-annotate --no-header --no-emit-package stacked-remat --output-file "$resolved" pyproject.toml
    {
        echo "# The exact versions that CI uses on Python $python, for every extra. Made by \`make constraints\`."
        cat "$resolved"
    } >"$file"
    rm -f "$resolved"
    echo "$file: $(grep -c == "$file") packages"
done
