#!/usr/bin/env bash
# Run check.py with the Python of the kit, on a machine that has none that Theano works with.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$here/../.." && pwd)

usage() {
    cat << END
Usage: tests/gpu/run_kit.sh [KIT.tar.xz] [OPTION of check.py ...]
       tests/gpu/run_kit.sh [KIT.tar.xz] --python ARGUMENT ...

Unpacks the kit (default: build/gpu-kit/kit.tar.xz of the checkout) into a temporary folder, links CUDA's
libraries there, and runs check.py, which takes all CUDA devices unless --devices names others. It writes
gpu-check.json and gpu-check.txt into the folder RECORD (default: the present one). Nothing else stays, unless
KEEP names a folder: then the kit is unpacked there, and what was compiled stays for the next time.
With --python the kit's Python gets the arguments, in place of check.py: -m synkhronos info

The exit status is 0 if nothing failed, 1 if something did, 2 if the kit does not work here. The options are
those of check.py:

END
}

fail() {
    echo "run_kit.sh: $*" >&2
    exit 2
}

kit=$checkout/build/gpu-kit/kit.tar.xz
case "${1:-}" in
    -h | --help) usage; sed -n 's/^ *add("\(--[a-z]*\)".*/  \1/p' "$here/check.py"; exit ;;
    *.tar.xz) kit=$1; shift ;;
esac
[ -r "$kit" ] || fail "there is no kit at $kit: tests/gpu/make_kit.sh makes it, on a machine with network"
for command in tar xz g++; do
    command -v "$command" > /dev/null || fail "$command is not here"
done
[ "${1:-}" != --python ] || [ $# -gt 1 ] || fail "--python needs what the kit's Python is to run: --python train.py"
record=${RECORD:-.}
mkdir -p "$record"
record=$(cd "$record" && pwd)

if [ -n "${KEEP:-}" ]; then
    mkdir -p "$KEEP"
    work=$(cd "$KEEP" && pwd)
else
    work=$(mktemp -d "${TMPDIR:-/tmp}/gpu-kit.XXXXXX")
    trap 'rm -rf "$work"' EXIT
fi
mkdir -p "$work/bin" "$work/home" "$work/tmp"
root=$work/kit
if [ ! -e "$root" ]; then
    mkdir -p "$work/part"
    tar xJf "$kit" -C "$work/part"
    mv "$work/part" "$root"
fi
python=$root/usr/bin/python3.11
libraries=$root/usr/lib:$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu

# The compiler is this machine's, and must not find the kit's libraries before its own.
cat > "$work/bin/g++" << END
#!/bin/sh
unset LD_LIBRARY_PATH
exec '$(command -v g++)' "\$@"
END
chmod +x "$work/bin/g++"
# As an installed Synkhronos has it: every interpreter finds a Theano that imports.
echo 'import synkhronos' > "$root/usr/local/lib/python3.11/dist-packages/synkhronos-import-support.pth"

kept=() # what the user chose for the devices and for Theano
while read -r name; do
    kept+=("$name=${!name}")
done < <(compgen -e | grep -E '^(THEANO_FLAGS|(CUDA|NVIDIA|NCCL|POCL|OCL|SYNKHRONOS)_.*)$')

clean() {
    local path=$1
    shift
    env -i "${kept[@]}" PATH="$work/bin:$PATH" HOME="$work/home" TMPDIR="$work/tmp" LANG=C.UTF-8 \
        PYTHONPATH="$checkout:$checkout/tests" PYTHONNOUSERSITE=1 PYTHONPYCACHEPREFIX="$work/pycache" PYTHONUNBUFFERED=1 \
        CPATH="$root/usr/include" LIBRARY_PATH="$root/usr/lib:$root/usr/lib/x86_64-linux-gnu" \
        LD_LIBRARY_PATH="$path" "$@"
}

# What an earlier step of all.sh has found out takes seconds.
known() { [ -n "${SYNKHRONOS_STEP:-}" ] && [ -e "$work/links.txt" ]; }

known || clean "$libraries" "$python" -c 'import synkhronos, theano' 2> "$work/import.txt" || {
    cat "$work/import.txt" >&2
    fail "the kit does not run here. It needs glibc 2.36 or newer; this is $(ldd --version 2>&1 | head -n 1)"
}

# Compiled now: Theano's and pygpu's sources bring warnings, which are errors in Synkhronos's tests.
if [ ! -e "$work/compiled" ]; then
    clean "$libraries" "$python" -W ignore -m compileall -q -j 0 \
        "$root"/usr/local/lib/python3.11/dist-packages "$root"/usr/lib/python3/dist-packages > "$work/compiled" 2>&1 || true
fi

# Wheels of CUDA lie beside the packages of this machine's Python, where that of the kit does not look.
wheels=$(python3 -c '
import glob, site, sysconfig
folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
print(":".join(sorted((p for f in folders for p in glob.glob(f + "/nvidia/*/lib")), reverse=True)))
' 2> /dev/null || true)
known || clean "$wheels${wheels:+:}$libraries" "$python" -m synkhronos info --link-cuda "$work/cuda" > "$work/links.part" 2>&1 ||
    echo "CUDA's libraries are not all here; ranks on cpu and OpenCL devices don't need them." >> "$work/links.part"
known || mv "$work/links.part" "$work/links.txt" # when all are linked: a step of all.sh may be ended before

# The driver and NCCL open more of the driver's libraries, such as libnvidia-ml.so.1, wherever those are.
driver=$(readlink -f "$work/cuda/libcuda.so" || true)
driver=${driver:+$(dirname "$driver")}

linked=$work/cuda:$libraries${driver:+:$driver}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
status=0
if [ "${1:-}" = --python ]; then
    shift
    clean "$linked" "$python" "$@" || status=$?
    exit "$status"
fi
{
    cat "$work/links.txt"
    clean "$linked" "$python" "$here/check.py" --json "$record/gpu-check.json" "$@"
} 2>&1 | tee "$record/gpu-check.txt" || status=$?
exit "$status"
