#!/usr/bin/env bash
# Make or reuse the virtual environment $1, with Python $2 (default: the one it has, or the first found from 3.11).
#
# Installs this checkout, editable, with the extras $3 (default: all that running, testing, checking and documenting take), at the
# versions of constraints/py3XX.txt, and the requirements in file $4 if given; with the extra `test`, Levanter. Uses uv, which is
# quicker, and pip where uv can't be installed or finds no packages. Stores a fingerprint of its inputs and the extras in the
# environment, returns at once where it has them all, and adds those that it lacks.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
python=${2-}
extras=${3-train,data,nnx,test,docs,check}
more=${4-}

if [ -z "$python" ]; then
    if "$venv/bin/python" -c "" 2>/dev/null; then
        python=$venv/bin/python
    else
        python=$(scripts/find_python.sh default)
    fi
fi
version_of() {
    "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true
}
version=$(version_of "$python")
case "$version" in
"")
    echo "Python '$python' does not start: name another with PYTHON=/path/to/python3." >&2
    exit 1
    ;;
2.* | 3.[0-9].* | 3.10.*)
    echo "Python 3.11 or later is needed, and '$python' is $version: name another with PYTHON=/path/to/python3." >&2
    exit 1
    ;;
esac

minor=${version#3.}
constraints=constraints/py3${minor%%.*}.txt
if [ -f "$constraints" ]; then
    pins=(-c "$constraints")
else
    pins=()
    constraints=
fi

alone=tests/levanter_requirements.txt # installed without dependencies
fingerprint="$version $(cat pyproject.toml $constraints scripts/make_venv.sh $alone $more | cksum)"
{ read -r made && read -r present; } 2>/dev/null <"$venv/.fingerprint" || made=
if [ "$made" = "$fingerprint" ] && "$venv/bin/python" -c "" 2>/dev/null; then
    wanted=$extras
    for extra in ${wanted//,/ }; do
        [[ ,$present, == *,$extra,* ]] || extras=$present,$wanted
    done
    [ "$extras" != "$wanted" ] || exit 0
fi

echo "Setting up $venv with Python $version (some minutes the first time) ..."
if [ -z "$constraints" ]; then
    echo "There are no constraints for this Python: the newest versions of everything are taken."
fi
if [ -e "$venv" ] && [ "$(version_of "$venv/bin/python")" != "$version" ]; then
    if [ ! -f "$venv/pyvenv.cfg" ]; then
        echo "'$venv' is in the way and is no virtual environment: remove it, or choose another with VENV=path." >&2
        exit 1
    fi
    rm -rf "$venv"
fi
rm -f "$venv/.fingerprint"

# Install all with the command $@. The build backend goes in first, pinned like the rest: the build isolation of pip and uv would
# ignore the constraints.
install_with() {
    "$@" ${pins[@]+"${pins[@]}"} hatchling editables &&
        "$@" ${pins[@]+"${pins[@]}"} --no-build-isolation -e ".[$extras]" &&
        if [[ ,$extras, == *,test,* ]]; then "$@" --no-deps -r "$alone"; fi &&
        if [ -n "$more" ]; then "$@" ${pins[@]+"${pins[@]}"} -r "$more"; fi
}

# uv reads no settings of pip, which may name a folder of packages.
links=${PIP_FIND_LINKS-$("$python" -m pip config get global.find-links 2>/dev/null || true)}
export UV_FIND_LINKS=${UV_FIND_LINKS-${links// /,}}
uv=$(scripts/find_uv.sh) || uv=
if [ -z "$uv" ] || ! {
    { [ -f "$venv/pyvenv.cfg" ] || "$uv" venv --quiet --seed --python "$python" "$venv"; } &&
        install_with "$uv" pip install --quiet --python "$venv/bin/python"
}; then
    echo "uv can't make $venv: pip makes it."
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv"
    # Bytecode is left to the processes that import, as uv leaves it: four fifths of what is here is never imported.
    install_with "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile
fi
printf '%s\n' "$fingerprint" "$extras" >"$venv/.fingerprint"
