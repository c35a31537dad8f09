#!/usr/bin/env bash
# Run all that a machine with a GPU is to tell, in the time for which it is lent.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$here/../.." && pwd)

usage() {
    cat << END
Usage: tests/gpu/all.sh [PART ...] [--time SECONDS] [--cpu] [--dry-run]

Runs these parts, or those that are named, in the order in which they are named:

  gpu     what synkhronos info finds; a step of training of the cnn and the mlp on cuda0, with cuDNN and without, beside
          serial Theano and PyTorch there; the demo's ResNet-50 beside PyTorch's
  cores   on 1 to 16 CPU ranks: training with the same rows for all ranks together and for each, the model of bench
          scaling fitted to both, second threads of cores, calls, and collectives beside Open MPI
  jax     likelihoods of PyMC models on cuda0 beside JAX alone, nutpie with JAX, numpyro, and 16 CPU ranks; then the
          suites of ranks on JAX's devices, with the kit of make_kit.sh --pymc and python3
  pymc    bench pymc on 2 to 16 ranks, with the same kit
  check   the check's group cudnn, and NCCL between 1 to 4 ranks on cuda0, beside one another
  whole   check.py with one rank on cuda0 and with two, beside one another; then the check's figures alone
  phases  where the seconds go until the demo's ResNet-50 trains, and once more

Each step has a time after which it is ended, and all together have --time (570). What no time is left for is left
out. A step's output and figures are written as soon as they are there. After each step, OUT (a folder; default:
gpu-results) has them in results.tar.gz, and what ran, what failed, and the figures beside their goals in summary.txt,
which is also printed. Both have the steps of earlier commands, too, as long as KEEP has them. The exit status is 1 if
a step failed, whatever the figures.

--cpu runs the same steps on CPU ranks, as short as they can be, to try this script. --dry-run prints them.

  KEEP         folder for the unpacked kit and compiled code, kept for the next call (build/gpu-all)
  PYTHON       a Python with Theano to use in place of the kit's
  LEAST        seconds that must be left for a step to begin (15)
  PEER_PYTHON  the one with PyTorch, and for jax and pymc with NumPy, SciPy, pandas, numba and JAX (python3)
END
}

fail() {
    echo "all.sh: $*" >&2
    exit 2
}

all=(gpu cores check jax pymc whole phases) parts=() limit=570 cpu='' dry=''
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --cpu) cpu=yes ;;
        --dry-run) dry=yes ;;
        --time)
            [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || fail "--time needs a number of seconds, got ${2:-nothing}"
            limit=$2
            shift
            ;;
        *)
            [[ " ${all[*]} " == *" $1 "* ]] || fail "there is no part or option $1; the parts are ${all[*]} (--help)"
            parts+=("$1")
            ;;
    esac
    shift
done
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")

least=${LEAST:-15} # seconds in which a step can do something
out=${OUT:-gpu-results}
work=${KEEP:-$checkout/build/gpu-all}
peer=$(command -v "${PEER_PYTHON:-python3}") || fail "there is no ${PEER_PYTHON:-python3}: PEER_PYTHON=..."
if [ -z "$dry" ]; then
    mkdir -p "$out" "$work"
    out=$(cd "$out" && pwd)
    work=$(cd "$work" && pwd)
    # Another machine's Python must not find the kit's libraries.
    cat > "$work/peer-python" << END
#!/bin/sh
LD_LIBRARY_PATH='${LD_LIBRARY_PATH:-}' exec '$peer' "\$@"
END
    chmod +x "$work/peer-python"
    mkdir -p "$work/results"
    touch "$work/begun"
fi
results=$work/results

if [ -n "${PYTHON:-}" ]; then
    theano=(env "PYTHONPATH=$checkout:$checkout/tests" "$PYTHON")
    check=("${theano[@]}" "$here/check.py")
else
    theano=("$here/run_kit.sh" --python)
    check=("$here/run_kit.sh")
fi
bench=("${theano[@]}" -m synkhronos bench)
beside=("${theano[@]}" -m benchmarks)
torch=(--peer-python "$work/peer-python")
if [ -n "$cpu" ]; then
    one=cpu two=cpu,cpu ranks=1,2 few=1,2 groups=2 pymc_ranks=2,1
    networks=mlp cnn=mlp rows=16 cnn_rows=4 weak_rows=8 seconds=0.02 brief=0.02 plain=() large=(--depth 8 --width 2 --size 8 --classes 4 --batch 8 --seconds 0.02)
    calls=(--calls 50 --idle 0.1 --megabytes 8) sizes=1K one_groups=versions two_groups=failure
    quick=(--quick) pymc=(--models logistic --rows 2000 --pays 1000)
    jax=jax:cpu likelihoods=(--ranks 2 --rows 2000 --seconds 0.2) large_rows=5000 draws=20 chosen=logistic
else
    one=cuda0 two=cuda0,cuda0 ranks=1,2,4,8,16 few=1,4,16 groups='16 4' pymc_ranks=16,4,2
    networks=cnn,mlp cnn=cnn rows=512 cnn_rows=256 weak_rows=64 seconds=0.7 brief=0.5 plain=(--plain-graphs) large=(--batch 64 --seconds 3)
    calls=(--calls 2000 --idle 3 --megabytes 300) sizes=1K,64K,1M,16M one_groups=versions,operations two_groups=training,failure,suites
    quick=() pymc=(--models logistic,hierarchical --pays 10000)
    jax=cuda0 likelihoods=(--ranks 16 --seconds 1.5) large_rows=5000000 draws=100
    chosen='functions or jax_that or dies or new_data or derivatives or chains or logistic or mixture'
fi
cores=(training --busy-ok --one-core-each --seconds $brief)

note() { # NAME WHAT SECONDS
    printf '%s\t%s\t%s\n' "$@" > "$results/$1.status"
}

step() { # NAME SECONDS COMMAND ...: run it for at most so long; with SECONDS+ for longer if nothing else comes
    local name=$1 most=${2%+} more=${2##*[0-9]} left began=$SECONDS status=0 file
    shift 2
    if [ -n "$dry" ]; then
        printf '%-18s %4d s  %s\n' "$name" "$most" "$*"
        return
    fi
    left=$((limit > SECONDS ? limit - SECONDS : 0))
    if [ "$left" -lt "$least" ] || [ "$((4 * left))" -lt "$most" ]; then
        leave_out "$name" "$left s of $limit were left"
        return
    fi
    [ -z "$more" ] || [ "$part" != "${parts[-1]}" ] || [ "$left" -lt "$most" ] || most=$left
    rm -rf "$results/$name" "$results/$name".*
    # Whatever a step starts has this variable, also in a session of its own.
    KEEP=${keep:-$work/kit} RECORD=$results/$name SYNKHRONOS_STEP=$$-$name \
        timeout -k 5 "$((most < left ? most : left))" "$@" > "$results/$name.txt" 2>&1 || status=$?
    for file in $(grep -lzx "SYNKHRONOS_STEP=$$-$name" /proc/[0-9]*/environ 2> /dev/null); do
        kill -KILL "$(basename "$(dirname "$file")")" 2> /dev/null || true
    done
    case $status in
        0) note "$name" ok $((SECONDS - began)) ;;
        124 | 137) note "$name" "failed: out of time" $((SECONDS - began)) ;;
        *) note "$name" "failed: exit status $status" $((SECONDS - began)) ;;
    esac
    tell
}

tell() { # write what there is by now, whole at any moment
    (
        flock 9
        "$peer" "$here/summary.py" "$results" > "$work/summary.part" 2>&1 || true
        mv "$work/summary.part" "$out/summary.txt"
        tar czf "$work/results.part" -C "$work" results
        mv "$work/results.part" "$out/results.tar.gz"
    ) 9> "$work/lock"
}

leave_out() { # NAME REASON
    if [ -n "$dry" ]; then
        echo "$1: left out: $2"
    elif ! grep -qs $'\tok\t' "$results/$1.status"; then # what an earlier command measured stays
        note "$1" "left out: $2" 0
    fi
}

part_gpu() {
    step info 30 "${theano[@]}" -m synkhronos info
    step training 100 "${beside[@]}" training --busy-ok --devices $one --networks $networks --batch $rows "${plain[@]}" \
        --seconds $seconds "${torch[@]}" --json "$results/training.json"
    step resnet 185 "${beside[@]}" resnet --busy-ok --devices $one "${large[@]}" "${torch[@]}" \
        --json "$results/resnet.json"
}

part_cores() {
    local n
    scaled strong 55 --networks mlp --ranks $ranks --batch $rows
    step threads 45 "${beside[@]}" threads --busy-ok --batch $rows --seconds $brief --json "$results/threads.json"
    step call 20 "${bench[@]}" call --busy-ok --device cpu "${calls[@]}" --json "$results/call.json"
    scaled strong-cnn 55 --networks $cnn --ranks $few --batch $cnn_rows
    scaled weak 45 --networks mlp --ranks $few --weak --batch $weak_rows
    for n in $groups; do
        step "collectives-$n" 25 "${beside[@]}" collectives --busy-ok --device cpu --ranks "$n" --sizes $sizes --no-models \
            --seconds 0.05 "${torch[@]}" --json "$results/collectives-$n.json"
    done
}

scaled() { # NAME SECONDS OPTION ...: training on several numbers of ranks, and the model of it
    local name=$1 most=$2
    shift 2
    step "$name" "$most" "${bench[@]}" "${cores[@]}" "$@" --json "$results/$name.json"
    step "scaling-$name" 4 "${bench[@]}" scaling "$results/$name.json"
}

part_check() {
    if [ -n "$cpu" ]; then
        leave_out cudnn "it needs a GPU"
        leave_out nccl "it needs a GPU"
        return
    fi
    step cudnn 55+ "${check[@]}" --devices $one --only cudnn --json "$results/cudnn.json" &
    step nccl 55+ "${theano[@]}" -m pytest -q -m "" -p no:cacheprovider \
        "$checkout/tests/devices/test_cuda.py" -k "test_nccl and not stand_in" &
    wait
}

part_phases() {
    step profile-resnet 200 "${theano[@]}" "$here/profile_resnet.py" --devices $one "${large[@]}" --times 2 --limit 120
}

part_whole() {
    keep=$work/kit-1 step check-one 400 "${check[@]}" "${quick[@]}" --devices $one --only $one_groups \
        --json "$results/check-one.json" &
    keep=$work/kit-2 step check-two 400 "${check[@]}" "${quick[@]}" --devices $two --only $two_groups \
        --json "$results/check-two.json" &
    if [ -z "$cpu" ]; then
        keep=$work/kit-3 step check-suites 400 "${check[@]}" --devices $one --only cudnn,$two_groups \
            --json "$results/check-suites.json" &
    fi
    wait
    step figures 100 "${check[@]}" "${quick[@]}" ${cpu:+--devices $two} --only figures --json "$results/figures.json"
}

pytensor() { # NAME SECONDS ARGUMENT ...: a step of python3 with the kit of PyMC
    local kit=$checkout/build/gpu-kit/kit-pymc.tar.xz site=$work/pymc name=$1 most=$2
    shift 2
    if [ ! -e "$kit" ]; then
        leave_out "$name" "there is no kit-pymc.tar.xz: make_kit.sh --pymc makes it"
        return
    fi
    if [ -z "$dry" ] && [ ! -e "$site" ]; then
        mkdir -p "$work/pymc-part"
        tar xJf "$kit" -C "$work/pymc-part"
        mv "$work/pymc-part" "$site"
    fi
    step "$name" "$most" env PYTHONPATH="$checkout:$checkout/tests:$site" PYTENSOR_FLAGS="base_compiledir=$work/pytensor" \
        SYNKHRONOS_HOST=pytensor SYNKHRONOS_TEST_JAX=$jax PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$peer" -W ignore "$@"
}

part_jax() {
    local beside=(-m benchmarks likelihoods --busy-ok --devices $jax "${likelihoods[@]}")
    pytensor jax 85 "${beside[@]}" --json "$results/jax.json"
    pytensor jax-large 40 "${beside[@]}" --models logistic --rows $large_rows --json "$results/jax-large.json"
    pytensor jax-draws 140 "${beside[@]}" --models logistic --draws $draws --json "$results/jax-draws.json"
    pytensor jax-suites 150 -m pytest -q -p no:cacheprovider -W ignore -k "$chosen" \
        tests/jax_devices/likelihood_cases.py tests/jax_devices
}

part_pymc() {
    pytensor pymc 80 -m synkhronos bench pymc --busy-ok --ranks $pymc_ranks "${pymc[@]}" --draws 0 --seconds 1 \
        --json "$results/pymc.json"
}

[ -n "$dry" ] || trap 'tell; cat "$out/summary.txt"' EXIT
for part in "${parts[@]}"; do
    "part_$part"
done
[ -n "$dry" ] || ! find "$results" -name '*.status' -newer "$work/begun" -exec grep -l failed {} + | grep -q .
