# Makes or reuses .venv beside the repository's root and installs this package into it. Sourced by serve.sh and
# test.sh, which set EXTRAS ("" or "[test]"). Leaves $PYTHON, the environment's interpreter.
#
# Nothing is installed again while pyproject.toml stays as it is. On a machine without CUDA, torch comes as a
# CPU build: the one that pip is configured for if there is one, else PyTorch's own CPU index.

TORCH='torch>=2.11,<2.14'
CPU_INDEX=https://download.pytorch.org/whl/cpu
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
PYTHON=$VENV/bin/python

say() { echo "[install] $*" >&2; }

fail() {
    say "$*"
    exit 1
}

find_python() {
    local name
    for name in python3.13 python3.12 python3.11 python3 python; do
        if command -v "$name" >/dev/null &&
            "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "needs Python 3.11 or newer, and found none (looked for python3.13, 3.12, 3.11, python3)"
}

# The version of torch that pip would install from the given sources; empty if it cannot tell.
torch_version() {
    "$PYTHON" -m pip install --quiet --dry-run --ignore-installed --no-deps --report - "$@" "$TORCH" 2>/dev/null |
        "$PYTHON" -c 'import json, sys
print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2>/dev/null
}

has_cuda() { command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; }

install_torch() {
    if "$PYTHON" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
        return # pip checks below that it is new enough
    fi
    if [ "$(uname -s)" != Linux ] || has_cuda; then
        say "installing torch (with CUDA where the platform has it)"
        "$PYTHON" -m pip install "$TORCH"
        return
    fi
    local version
    version=$(torch_version)
    case $version in
        *+cpu)
            say "no CUDA here: installing torch $version, the CPU build that pip is configured for"
            "$PYTHON" -m pip install "torch==$version"
            ;;
        *)
            say "no CUDA here: installing the CPU build of torch from $CPU_INDEX"
            if ! "$PYTHON" -m pip install --index-url "$CPU_INDEX" "$TORCH"; then
                say "no CPU build of torch is to be had: installing the one that pip finds (torch $version, large)"
                "$PYTHON" -m pip install "$TORCH"
            fi
            ;;
    esac
}

install() {
    local stamp=$VENV/.mambalign$EXTRAS state
    if [ ! -x "$PYTHON" ]; then
        local base
        base=$(find_python) || exit 1
        say "making $VENV with $base"
        "$base" -m venv "$VENV" || fail "could not make it (on Debian and Ubuntu: apt install python3-venv)"
    fi
    state="$ROOT $(cksum <"$ROOT/pyproject.toml")"
    if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then
        return
    fi
    say "installing into $VENV; the first time this takes some minutes"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check 'pip>=24'
    install_torch || fail "could not install torch"
    say "installing mambalign$EXTRAS and what it needs"
    "$PYTHON" -m pip install --disable-pip-version-check -e "$ROOT$EXTRAS" || fail "could not install mambalign"
    echo "$state" >"$stamp"
    say "done"
}

install
