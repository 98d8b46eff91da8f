#!/usr/bin/env bash
# Installs what is missing and serves a model: scripts/serve.sh [model] [options]; --help lists the options.
set -uo pipefail
EXTRAS=
. "$(dirname "${BASH_SOURCE[0]}")/install.sh"
exec "$VENV/bin/serve" "$@"
