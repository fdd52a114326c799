#!/usr/bin/env bash
# Runs the litmus tests under Arm's own model of aarch64 (herd7's aarch64.cat): each must say what its third line says.
# Needs herd7, of herdtools7 (github.com/herd/herdtools7). HERD names another one; arguments: tests, all if none. Exit status 1: one says otherwise.
set -euo pipefail
cd "$(dirname "$0")"
command -v "${HERD:-herd7}" >/dev/null || { echo "herd7 is not installed: github.com/herd/herdtools7" >&2; exit 2; }
failed=0
for test in "${@:-*.litmus}"; do
    for file in $test; do
        wanted=$(sed -n '3s/[^A-Z]*\([A-Za-z]*\).*/\1/p' "$file")
        said=$("${HERD:-herd7}" "$file" | sed -n 's/^Observation [^ ]* \([A-Za-z]*\).*/\1/p')
        [ "$said" = "$wanted" ] && word=ok || { word=WRONG failed=1; }
        printf '%-6s %-24s %-10s %s\n' "$word" "${file%.litmus}" "${said:-nothing}" "$(sed -n '2s/"//gp' "$file")"
    done
done
exit "$failed"
