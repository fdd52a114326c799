#!/usr/bin/env bash
# Checks docs/model/lane.pml with spin: every property in every configuration, by exhaustive search.
#
#   check.sh              the configurations of `make model`: under a minute, 0.5 GB
#   check.sh --long       larger ones: five minutes, 1.4 GB
#   check.sh --mutations  one planted error at a time, each of which must be found: half a minute
#   check.sh --trace BUG  the steps that lead to the failure which that error causes
#
# Exit status: 0 if all is as it should be, 1 if not, 2 if spin or gcc is missing.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
model=$here/lane.pml
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# name | model's constants | what to search for (safety, cycles) | how states are stored (plain, collapsed)
usual='2 slots, 4 records, 1 kill                  | -DM=2 -DN=4 -DKILLS=1                       | safety | plain
2 slots, 3 records, 2 kills                 | -DM=2 -DN=3 -DKILLS=2                       | safety | plain
3 slots, 3 records, 1 kill                  | -DM=3 -DN=3 -DKILLS=1                       | safety | plain
3 slots, 4 records                          | -DM=3 -DN=4 -DKILLS=0                       | safety | plain
2 slots, 2 records, 1 kill, 1 abort         | -DM=2 -DN=2 -DKILLS=1 -DABORTS=1            | safety | plain
2 slots, 2 records, 1 kill, 1 wake, 1 again | -DM=2 -DN=2 -DKILLS=1 -DSPURIOUS=1 -DREPEATS=1 | safety | plain
every run ends: 2 slots, 2 records, 1 kill  | -DM=2 -DN=2 -DKILLS=1                       | cycles | plain'

long='2 slots, 4 records, 2 kills                 | -DM=2 -DN=4 -DKILLS=2                       | safety | collapsed
3 slots, 4 records, 2 kills                 | -DM=3 -DN=4 -DKILLS=2                       | safety | collapsed
3 slots, 3 records, 2 kills, 3 leases       | -DM=3 -DN=3 -DKILLS=2 -DHOLD=3              | safety | plain
2 slots, 3 records, 2 kills, 1 abort        | -DM=2 -DN=3 -DKILLS=2 -DABORTS=1            | safety | collapsed
2 slots, 3 records, 1 kill, 1 wake, 1 again | -DM=2 -DN=3 -DKILLS=1 -DSPURIOUS=1 -DREPEATS=1 | safety | plain
every run ends: 2 slots, 3 records, 1 kill  | -DM=2 -DN=3 -DKILLS=1                       | cycles | plain'

properties='COMMITTED  only committed records leave a consumer
BYTES      a record is whole and its own; nothing is written into a slot that is leased or not released
TWICE      no record comes after its release, or twice from one consumer; from a second one only with the mark
MARK       redelivered exactly where a killed consumer had stored head for it
ORDER      by sequence, none left out
RING       tail - head < M before an entry is written
REST       when nothing can move, everything committed was handed out and released
SPACE      when nothing can move, no producer waits for space
UNLINK     a dead lane goes, and only after everything committed in it was released'

# planted error | property that must fail | model's constants
mutations='ABORT_BUMPS               | TWICE     | -DN=2 -DKILLS=1 -DABORTS=1
GENERATION_BEFORE_BODY    | BYTES     | -DN=3 -DKILLS=1
TAIL_BEFORE_GENERATION    | BYTES     | -DN=2 -DKILLS=0
TAIL_BEFORE_RING          | BYTES     | -DN=3 -DKILLS=0
FLAG_BEFORE_TAIL          | REST      | -DN=2 -DKILLS=0
HEAD_AFTER_HAND_OUT       | TWICE     | -DN=2 -DKILLS=1
HEAD_GOES_BACK            | TWICE     | -DN=2 -DKILLS=2
HEAD_JUMPS_AT_TAKEOVER    | MARK      | -DN=2 -DKILLS=2
ADOPTED_WITHOUT_HEAD      | TWICE     | -DN=2 -DKILLS=1
SCAN_BEFORE_TAIL          | REST      | -DN=2 -DKILLS=0
SCAN_IGNORES_TAIL         | COMMITTED | -DN=2 -DKILLS=0
SEQUENCE_BEFORE_GENERATION | TWICE    | -DN=3 -DKILLS=1
RELEASED_BEFORE_LAST_READ | BYTES     | -DN=3 -DKILLS=0
RELEASED_AGAIN_LATER      | TWICE     | -DN=3 -DKILLS=1
FLAG_BEFORE_RELEASED      | SPACE     | -DN=3 -DKILLS=0
NO_RECHECK_BY_HUB         | REST      | -DN=2 -DKILLS=0
NO_RECHECK_BY_PRODUCER    | SPACE     | -DN=3 -DKILLS=0
DOORBELL_LOADED_LATE      | REST      | -DN=2 -DKILLS=0
SPACE_BELL_LOADED_LATE    | SPACE     | -DN=3 -DKILLS=0
WAIT_WITHOUT_COMPARE      | SPACE     | -DN=3 -DKILLS=0
ARRIVALS_LOADED_LATE      | REST      | -DN=2 -DKILLS=0
ARRIVAL_ONLY_COUNTED      | REST      | -DN=2 -DKILLS=1
SECOND_SLEEPER            | REST      | -DN=2 -DKILLS=0
NO_BELL_AT_TAKEOVER       | SPACE     | -DN=2 -DKILLS=1
NO_WATCHER                | REST      | -DN=2 -DKILLS=1
UNLINK_BY_OLD_TAIL        | UNLINK    | -DN=2 -DKILLS=0
LAST_RELEASE_SILENT       | UNLINK    | -DN=2 -DKILLS=0'

failed=0
say() { printf '%-6s %s\n' "$@"; }

# build OPTIMISATION MODEL-CONSTANTS... -- C-CONSTANTS...: makes ./pan. No partial order reduction: every step touches shared words.
build() {
    local level=$1 constants=()
    shift
    while [ "$1" != -- ]; do constants+=("$1"); shift; done
    shift
    rm -f pan pan.c ./*.trail
    spin -a "${constants[@]}" "$model" >spin.out 2>&1 && [ -f pan.c ] || { cat spin.out; exit 1; }
    gcc "$level" -w -DNOREDUCE -DMEMLIM=1900 "$@" -o pan pan.c
}

# Whether the last search visited every state and found nothing.
clean_search() {
    grep -q 'errors: 0$' out && grep -q '^Full statespace search' out &&
        ! grep -qiE 'not completed|max search depth|out of memory|memory limit|hash-?compact|bit statespace' out
}

configurations() {
    local name constants kind storage how began
    : >unreached
    while IFS='|' read -r name constants kind storage; do
        how=()
        [ "${kind// /}" = cycles ] && how+=(-DNP) || how+=(-DSAFETY)
        [ "${storage// /}" = collapsed ] && how+=(-DCOLLAPSE)
        # shellcheck disable=SC2086
        build -O2 $constants -- "${how[@]}"
        began=$(date +%s%N)
        ./pan -m10000 -w24 $([ "${kind// /}" = cycles ] && echo -l) >out 2>&1 || true
        local states seconds
        states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' out)
        seconds=$(($(date +%s%N) - began))
        if clean_search; then
            say ok "$(printf '%-44s %9s states %4d.%d s' "${name%"${name##*[! ]}"}" "$states" $((seconds / 1000000000)) $((seconds / 100000000 % 10)))"
        else
            failed=1
            say FAILED "$name"
            grep -vE '^(Depth=|$)' out | sed -n 1,12p
        fi
        if [ "${kind// /}" = safety ]; then
            sed -n 's/^\t.*lane.pml:\([0-9]*\), state [0-9]*, "\(.*\)"$/\1 \2/p' out | sort -u >unreached.now
            if [ -s searched ]; then comm -12 unreached unreached.now >both; mv both unreached; else cp unreached.now unreached; fi
            echo "$name" >>searched
        fi
    done
    [ "$failed" = 0 ] || return 0
    if grep -v -- '-end-' unreached; then
        failed=1
        say FAILED 'no configuration reaches the statements above'
    else
        say ok 'every statement of the model is reached'
    fi
}

mutants() {
    local bug property constants states
    while IFS='|' read -r bug property constants; do
        bug=${bug// /} property=${property// /}
        # shellcheck disable=SC2086
        build -O0 $constants -DCHECK="$property" -DBUG_"$bug" -- -DSAFETY
        ./pan -E -m10000 -w22 >out 2>&1 || true
        states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' out)
        if grep -q 'errors: 1$' out && grep -q 'assertion violated' out; then
            say found "$(printf '%-27s breaks %-9s after %8s states' "$bug" "$property" "$states")"
        else
            failed=1
            say MISSED "$bug"
        fi
    done
}

trace() {
    local bug property constants
    while IFS='|' read -r bug property constants; do
        [ "${bug// /}" = "$1" ] || continue
        property=${property// /}
        # shellcheck disable=SC2086
        build -O1 $constants -DCHECK="$property" -DBUG_"$1" -- -DSAFETY
        ./pan -E -m10000 -i -w22 >out 2>&1 || true # -i: a short path
        # shellcheck disable=SC2086
        spin -t -p -k lane.pml.trail $constants -DCHECK="$property" -DBUG_"$1" "$model" | grep -vE '\(atomic\)|select'
        return
    done
    echo "no planted error is called $1" >&2
    exit 1
}

for tool in spin gcc; do
    command -v "$tool" >/dev/null || { echo "$tool is missing: apt install $tool" >&2; exit 2; }
done
case ${1:-} in
    '') configurations <<<"$usual" ;;
    --long) configurations <<<"$long" ;;
    --mutations) mutants <<<"$mutations" ;;
    --trace) trace "${2:?name of a planted error}" <<<"$mutations" ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$here/check.sh"; exit 1 ;;
esac
if [ "${1:-}" != --mutations ] && [ "${1:-}" != --trace ] && [ "$failed" = 0 ]; then
    while read -r line; do say holds "$line"; done <<<"$properties"
fi
exit "$failed"
