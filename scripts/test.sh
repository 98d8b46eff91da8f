#!/usr/bin/env bash
# Installs what is missing, then lints and runs the tests: scripts/test.sh [--all] [pytest arguments].
# --all also runs the slow cells of the suites. The dashboard's tests need a browser: as root on Debian, Chromium is
# installed for them; elsewhere they are skipped where there is none. Files of tests run side by side, one a core (one
# after the other on a GPU, whose memory they would share); -n 0 among the arguments: in this process, for a debugger.
set -uo pipefail
EXTRAS='[test]'
. "$(dirname "${BASH_SOURCE[0]}")/install.sh"
cd "$ROOT" || exit 1

install_browser() {
    local log
    command -v chromium chromium-browser google-chrome >/dev/null && return
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "no chromium here: the dashboard's tests will be skipped"
        return
    fi
    say "installing chromium for the dashboard's tests"
    log=$( (export DEBIAN_FRONTEND=noninteractive && timeout 120 apt-get update &&
        timeout 600 apt-get install -y --no-install-recommends chromium) 2>&1 </dev/null) ||
        say "could not install it, so they will be skipped: $(tail -n 1 <<<"$log")"
}

install_browser
"$PYTHON" -m ruff check . || exit 1
has_cuda && at_once=0 || at_once=auto
exec "$PYTHON" -m pytest --numprocesses "$at_once" --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
