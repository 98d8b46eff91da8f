#!/usr/bin/env bash
# Installs what is missing, then lints and runs the tests: scripts/test.sh [--all] [pytest arguments].
# --all also runs the slow cells of the suites.
set -uo pipefail
EXTRAS='[test]'
. "$(dirname "${BASH_SOURCE[0]}")/install.sh"
cd "$ROOT" || exit 1
"$PYTHON" -m ruff check . || exit 1
exec "$PYTHON" -m pytest "$@"
