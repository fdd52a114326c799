#!/usr/bin/env bash
# Checks docs/model/lane.pml and ranks.pml with spin: every property in every configuration, by exhaustive search.
#
#   check.sh              the configurations of `make model`: two minutes, 0.9 GB
#   check.sh --long       larger ones: ten minutes, 1.5 GB
#   check.sh --mutations  one planted error at a time, each of which must be found: a minute
#   check.sh --trace BUG  the steps that lead to the failure which that error causes
#
# Exit status: 0 if all is as it should be, 1 if not, 2 if spin or gcc is missing.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# model | name | model's constants | what to search for (safety, cycles) | how states are stored (plain, collapsed)
usual='lane  | 2 slots, 4 records, 1 kill                  | -DM=2 -DN=4 -DKILLS=1                       | safety | plain
lane  | 2 slots, 3 records, 2 kills                 | -DM=2 -DN=3 -DKILLS=2                       | safety | plain
lane  | 3 slots, 3 records, 1 kill                  | -DM=3 -DN=3 -DKILLS=1                       | safety | plain
lane  | 3 slots, 4 records                          | -DM=3 -DN=4 -DKILLS=0                       | safety | plain
lane  | 2 slots, 2 records, 1 kill, 1 abort         | -DM=2 -DN=2 -DKILLS=1 -DABORTS=1            | safety | plain
lane  | 2 slots, 2 records, 1 kill, 1 wake, 1 again | -DM=2 -DN=2 -DKILLS=1 -DSPURIOUS=1 -DREPEATS=1 | safety | plain
lane  | every run ends: 2 slots, 2 records, 1 kill  | -DM=2 -DN=2 -DKILLS=1                       | cycles | plain
ranks | 1 rank, 2 + 1 slots, 2 + 2 records, 2 kills         | -DCOARSE -DM0=2 -DN0=2 -DN1=2 -DKILLS=2 | safety | collapsed
ranks | 1 rank, 2 + 1 slots, 2 + 1 records, 2 kills, 1 message again | -DCOARSE -DM0=2 -DN0=2 -DN1=1 -DKILLS=2 -DREPEATS=1 | safety | collapsed
ranks | 1 rank, 2 + 1 slots, 2 + 1 records, 2 kills, both locks | -DCOARSE -DM0=2 -DN0=2 -DN1=1 -DKILLS=2 -DLOCK_BOTH | safety | collapsed
ranks | 1 rank, 3 + 1 slots, 4 + 1 records, 1 kill      | -DCOARSE -DM0=3 -DN0=4 -DN1=1 -DKILLS=1 | safety | collapsed
ranks | 2 ranks, sharded, 1 + 2 records, 1 kill         | -DCOARSE -DRANKS=2 -DM0=2 -DN0=1 -DN1=2 -DKILLS=1 | safety | collapsed
ranks | 2 ranks, broadcast, 1 + 1 records, 1 kill, 1 message again | -DCOARSE -DRANKS=2 -DBROADCAST -DM0=2 -DN0=1 -DN1=1 -DKILLS=1 -DREPEATS=1 | safety | collapsed
ranks | 2 ranks, sharded, spread, 1 + 1 records, 2 deaths of ranks | -DCOARSE -DRANKS=2 -DSPREAD -DRANKS_ONLY -DM0=1 -DN0=1 -DN1=1 -DKILLS=2 | safety | collapsed
ranks | 2 ranks, broadcast, spread, 1 record, 2 kills   | -DCOARSE -DRANKS=2 -DBROADCAST -DSPREAD -DM0=1 -DN0=1 -DN1=0 -DKILLS=2 | safety | collapsed
ranks | sleep and wake, 2 + 1 slots, 1 + 2 records, 2 kills | -DNO_RANKS -DM0=2 -DN0=1 -DN1=2 -DKILLS=2 | safety | collapsed
ranks | sleep and wake, lanes appear, 1 + 1 records, 1 kill | -DNO_RANKS -DLATE -DM0=2 -DN0=1 -DN1=1 -DKILLS=1 | safety | collapsed
ranks | sleep and wake, 1 rank, 1 + 1 records, 1 kill   | -DM0=2 -DN0=1 -DN1=1 -DKILLS=1 | safety | collapsed
ranks | sleep and wake, 1 rank, 1 + 2 records           | -DM0=2 -DN0=1 -DN1=2 -DKILLS=0 | safety | collapsed
ranks | every run ends: 1 rank, 1 + 1 records, 1 kill   | -DCOARSE -DM0=2 -DN0=1 -DN1=1 -DKILLS=1 | cycles | collapsed'

long='lane  | 2 slots, 4 records, 2 kills                 | -DM=2 -DN=4 -DKILLS=2                       | safety | collapsed
lane  | 3 slots, 4 records, 2 kills                 | -DM=3 -DN=4 -DKILLS=2                       | safety | collapsed
lane  | 3 slots, 3 records, 2 kills, 3 leases       | -DM=3 -DN=3 -DKILLS=2 -DHOLD=3              | safety | plain
lane  | 2 slots, 3 records, 2 kills, 1 abort        | -DM=2 -DN=3 -DKILLS=2 -DABORTS=1            | safety | collapsed
lane  | 2 slots, 3 records, 1 kill, 1 wake, 1 again | -DM=2 -DN=3 -DKILLS=1 -DSPURIOUS=1 -DREPEATS=1 | safety | plain
lane  | every run ends: 2 slots, 3 records, 1 kill  | -DM=2 -DN=3 -DKILLS=1                       | cycles | plain
ranks | sleep and wake, 1 rank, 1 + 2 records, 1 kill   | -DM0=2 -DN0=1 -DN1=2 -DKILLS=1 | safety | collapsed
ranks | 2 ranks, sharded, 1 + 1 records, 2 kills        | -DCOARSE -DRANKS=2 -DM0=2 -DN0=1 -DN1=1 -DKILLS=2 | safety | collapsed
ranks | 2 ranks, broadcast, 1 + 1 records, 2 kills      | -DCOARSE -DRANKS=2 -DBROADCAST -DM0=2 -DN0=1 -DN1=1 -DKILLS=2 | safety | collapsed
ranks | 2 ranks, broadcast, spread, 1 + 1 records, 2 kills | -DCOARSE -DRANKS=2 -DBROADCAST -DSPREAD -DM0=1 -DN0=1 -DN1=1 -DKILLS=2 | safety | collapsed
ranks | 2 ranks, sharded, spread, 1 + 1 records, 2 kills | -DCOARSE -DRANKS=2 -DSPREAD -DM0=1 -DN0=1 -DN1=1 -DKILLS=2 | safety | collapsed
ranks | every run ends: 1 rank, 2 + 1 records, 1 kill   | -DCOARSE -DM0=2 -DN0=2 -DN1=1 -DKILLS=1 | cycles | collapsed'

properties='COMMITTED  only committed records leave a consumer
BYTES      a record is whole and its own; nothing is written into a slot that is leased or not released
TWICE      no record comes after its release, or twice from one consumer; from a second one only with the mark
MARK       redelivered exactly where a killed consumer had stored head for it
ORDER      by sequence, none left out
RING       tail - head < M before an entry is written
REST       when nothing can move, everything committed was read and released
SPACE      when nothing can move, no producer waits for space
UNLINK     a dead lane goes, and only after everything committed in it was released
RANK_BYTES nothing is released, hence nothing written, while a rank looks at it
SHARE      a record is released only after each rank that was to read it, or its successor, did; with spread, after some rank did
OPENED     what a rank opens is the record that its manifest names'

# model | planted error | property that must fail, or with a minus must hold in spite of it (- alone: all) | model's constants
mutations='lane  | ABORT_BUMPS               | TWICE     | -DN=2 -DKILLS=1 -DABORTS=1
lane  | GENERATION_BEFORE_BODY    | BYTES     | -DN=3 -DKILLS=1
lane  | TAIL_BEFORE_GENERATION    | BYTES     | -DN=2 -DKILLS=0
lane  | TAIL_BEFORE_RING          | BYTES     | -DN=3 -DKILLS=0
lane  | FLAG_BEFORE_TAIL          | REST      | -DN=2 -DKILLS=0
lane  | HEAD_AFTER_HAND_OUT       | TWICE     | -DN=2 -DKILLS=1
lane  | HEAD_GOES_BACK            | TWICE     | -DN=2 -DKILLS=2
lane  | HEAD_JUMPS_AT_TAKEOVER    | MARK      | -DN=2 -DKILLS=2
lane  | ADOPTED_WITHOUT_HEAD      | TWICE     | -DN=2 -DKILLS=1
lane  | SCAN_BEFORE_TAIL          | REST      | -DN=2 -DKILLS=0
lane  | SCAN_IGNORES_TAIL         | COMMITTED | -DN=2 -DKILLS=0
lane  | SEQUENCE_BEFORE_GENERATION | TWICE    | -DN=3 -DKILLS=1
lane  | RELEASED_BEFORE_LAST_READ | BYTES     | -DN=3 -DKILLS=0
lane  | RELEASED_AGAIN_LATER      | TWICE     | -DN=3 -DKILLS=1
lane  | FLAG_BEFORE_RELEASED      | SPACE     | -DN=3 -DKILLS=0
lane  | NO_RECHECK_BY_HUB         | REST      | -DN=2 -DKILLS=0
lane  | NO_RECHECK_BY_PRODUCER    | SPACE     | -DN=3 -DKILLS=0
lane  | DOORBELL_LOADED_LATE      | REST      | -DN=2 -DKILLS=0
lane  | SPACE_BELL_LOADED_LATE    | SPACE     | -DN=3 -DKILLS=0
lane  | WAIT_WITHOUT_COMPARE      | SPACE     | -DN=3 -DKILLS=0
lane  | ARRIVALS_LOADED_LATE      | REST      | -DN=2 -DKILLS=0
lane  | ARRIVAL_ONLY_COUNTED      | REST      | -DN=2 -DKILLS=1
lane  | SECOND_SLEEPER            | REST      | -DN=2 -DKILLS=0
lane  | NO_BELL_AT_TAKEOVER       | SPACE     | -DN=2 -DKILLS=1
lane  | NO_WATCHER                | REST      | -DN=2 -DKILLS=1
lane  | UNLINK_BY_OLD_TAIL        | UNLINK    | -DN=2 -DKILLS=0
lane  | LAST_RELEASE_SILENT       | UNLINK    | -DN=2 -DKILLS=0
ranks | DONE_BY_NUMBER | RANK_BYTES | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=1
ranks | ASK_BY_NUMBER | REST | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=1
ranks | NOT_REISSUED | REST | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=1
ranks | ANSWER_AGAIN_UNMARKED | MARK | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=1 -DREPEATS=1
ranks | MESSAGE_WITHOUT_EPOCH | SHARE | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=1 -DREPEATS=1
ranks | MANIFEST_WITHOUT_EPOCH | RANK_BYTES | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=1
ranks | MANIFEST_WITHOUT_STEP | RANK_BYTES | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=0 -DREPEATS=1
ranks | DONE_WITHOUT_STEP | RANK_BYTES | -DCOARSE -DM0=1 -DN0=2 -DN1=1 -DKILLS=0 -DREPEATS=1
ranks | DONE_BEFORE_LAST_VIEW | RANK_BYTES | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=0
ranks | FIRST_DONE_RELEASES | RANK_BYTES | -DCOARSE -DRANKS=2 -DBROADCAST -DM0=1 -DN0=1 -DN1=1 -DKILLS=0
ranks | DONES_COUNTED | RANK_BYTES | -DCOARSE -DRANKS=2 -DBROADCAST -DM0=1 -DN0=1 -DN1=1 -DKILLS=0
ranks | DEATH_IS_A_WORD | SHARE | -DCOARSE -DRANKS=2 -DBROADCAST -DSPREAD -DRANKS_ONLY -DM0=1 -DN0=1 -DN1=0 -DKILLS=2
ranks | RELEASES_AT_ONCE | RANK_BYTES | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=1
ranks | RELEASES_AT_ONCE | -OPENED | -DCOARSE -DM0=1 -DN0=2 -DN1=1 -DKILLS=1
ranks | GENERATION_NOT_COMPARED | OPENED | -DCOARSE -DM0=1 -DN0=2 -DN1=1 -DKILLS=1 -DBUG_RELEASES_AT_ONCE
ranks | RANGE_WITHOUT_LAST_EPOCH | RANK_BYTES | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=1
ranks | LOOKS_AT_LAST_EPOCH_ONLY | RANK_BYTES | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=2
ranks | UNLINK_FORGETS_PUT_OFF | UNLINK | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=2
ranks | LOCKS_LAST | RANK_BYTES | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=1
ranks | MOVES_KEEPING_VIEWS | RANK_BYTES | -DCOARSE -DM0=1 -DN0=1 -DN1=1 -DKILLS=1 -DLOCK_BOTH
ranks | RECHECK_OF_ONE_LANE | REST | -DNO_RANKS -DM0=1 -DN0=1 -DN1=1 -DKILLS=0
ranks | NO_RECHECK_AFTER_LOCK | - | -DCOARSE -DM0=2 -DN0=2 -DN1=1 -DKILLS=2'

failed=0
say() { printf '%-6s %s\n' "$@"; }

# build OPTIMISATION MODEL-CONSTANTS... -- C-CONSTANTS...: makes ./pan. No partial order reduction: every step touches shared words.
build() {
    local level=$1 constants=()
    shift
    while [ "$1" != -- ]; do constants+=("$1"); shift; done
    shift
    rm -f pan pan.c ./*.trail
    spin -a "${constants[@]}" "$here/$model.pml" >spin.out 2>&1 && [ -f pan.c ] || { cat spin.out; exit 1; }
    gcc "$level" -w -DNOREDUCE -DMEMLIM=4000 "$@" -o pan pan.c
}

# Whether the last search visited every state and found nothing.
clean_search() {
    grep -q 'errors: 0$' out && grep -q '^Full statespace search' out &&
        ! grep -qiE 'not completed|max search depth|out of memory|memory limit|hash-?compact|bit statespace' out
}

# The statements of every configuration's model that no search reached; $1: model.
never_reached() {
    awk 'FNR == NR { there[$1]++; next } { missed[$0]++ } END { for (s in missed) { split(s, w, " "); if (missed[s] == there[w[1]]) print s } }' \
        "there.$1" "missed.$1" | sort -n | grep -v -- '-end-'
}

configurations() {
    local model name constants kind storage how states seconds
    while IFS='|' read -r model name constants kind storage; do
        model=${model// /} kind=${kind// /} how=()
        [ "$kind" = cycles ] && how+=(-DNP) || how+=(-DSAFETY)
        [ "${storage// /}" = collapsed ] && how+=(-DCOLLAPSE)
        # shellcheck disable=SC2086
        build -O2 $constants -- "${how[@]}"
        seconds=$( (TIMEFORMAT=%U; time ./pan -m10000 -w24 $([ "$kind" = cycles ] && echo -l) >out 2>&1) 2>&1) || true
        states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' out)
        if clean_search; then
            # shellcheck disable=SC2086
            say ok "$(printf '%-5s %-58s %9s states %6.1f s' "$model" "$(echo $name)" "$states" "$seconds")"
        else
            failed=1
            say FAILED "$model $name"
            grep -vE '^(Depth=|$)' out | sed -n 1,12p
        fi
        if [ "$kind" = safety ]; then # a statement is named by its line and its text
            ./pan -d | sed -n 's/.*\.pml:\([0-9]*\) => .*/\1/p' | sort -u >>"there.$model"
            sed -n 's/^\t.*\.pml:\([0-9]*\), state [0-9]*, "\(.*\)"$/\1 \2/p' out | sort -u >>"missed.$model"
        fi
    done
    [ "$failed" = 0 ] || return 0
    for model in lane ranks; do
        if never_reached "$model"; then
            failed=1
            say FAILED "no configuration reaches the statements of $model.pml above"
        else
            say ok "every statement of $model.pml is reached"
        fi
    done
}

mutants() {
    local model bug property constants states check
    while IFS='|' read -r model bug property constants; do
        model=${model// /} bug=${bug// /} property=${property// /} check=()
        [ "$property" = - ] || check=(-DCHECK="${property#-}")
        # shellcheck disable=SC2086
        build -O0 $constants "${check[@]}" -DBUG_"$bug" -- -DSAFETY
        ./pan -E -m10000 -w22 >out 2>&1 || true
        states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' out)
        if [ "${property:0:1}" = - ] && clean_search; then
            say holds "$(printf '%-27s breaks %-10s in    %8s states' "$bug" "${property#-} nothing" "$states")"
        elif [ "${property:0:1}" != - ] && grep -q 'errors: 1$' out && grep -q 'assertion violated' out; then
            say found "$(printf '%-27s breaks %-10s after %8s states' "$bug" "$property" "$states")"
        else
            failed=1
            say MISSED "$bug"
        fi
    done
}

trace() {
    local model bug property constants
    while IFS='|' read -r model bug property constants; do
        model=${model// /} property=${property// /}
        [ "${bug// /}" = "$1" ] && [ "${property:0:1}" != - ] || continue
        # shellcheck disable=SC2086
        build -O1 $constants -DCHECK="$property" -DBUG_"$1" -- -DSAFETY
        ./pan -E -m10000 -i -w22 >out 2>&1 || true # -i: a short path
        # shellcheck disable=SC2086
        spin -t -p -k "$model.pml.trail" $constants -DCHECK="$property" -DBUG_"$1" "$here/$model.pml" | grep -vE '\(atomic\)|select'
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
