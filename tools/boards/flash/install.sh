#!/bin/sh
# Puts fedquilt onto this board: sudo sh install.sh [--dry-run | --uninstall [--purge]]. Needs no network.
here=$(cd "$(dirname "$0")" && pwd) || exit 6
for python in @INTERPRETER@ python3; do
    if command -v "$python" >/dev/null 2>&1; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' && exec "$python" -B "$here/install.py" "$@"
    fi
done
echo "fedquilt: this bundle needs @INTERPRETER@, which is not here or too old: fedquilt board flash builds one for this board" >&2
exit 2
