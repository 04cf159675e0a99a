#!/bin/sh
# Puts fedquilt onto this board: sudo sh install.sh [--dry-run | --uninstall [--purge]]. Needs no network.
here=$(cd "$(dirname "$0")" && pwd) || exit 6
own=""
if [ -f "$here/python.tar" ]; then # this board's own Python is too old: one comes along
    tar -xf "$here/python.tar" -C "$here" && own=$(echo "$here"/python/bin/python3.*)
fi
for python in $own @INTERPRETER@ python3; do
    if command -v "$python" >/dev/null 2>&1; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' && exec "$python" -B "$here/install.py" "$@"
    fi
done
echo "fedquilt: this bundle needs @INTERPRETER@, which is not here or too old: fedquilt board flash builds one for this board" >&2
exit 2
