"""Build a release from the last commit, check what is in it, and try it on each Python.

    .venv/bin/python .ci/release.py [VERSION_OF_PYTHON ...]

The sdist and the wheel are in dist/. Nothing is uploaded: the last line is the command for that.
"""

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
LARGEST = {".whl": 1.1e6, ".gz": 3.0e6}  # bytes: sources alone
HOST = ROOT / "synkhronos" / "_host"
PYTHONS = runpy.run_path(str(HOST / "pythons.py"))


def run(*command, **kwargs):
    """Return what a command prints; end with it if the command fails."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([str(each) for each in command], **pipes, **kwargs)
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


def build(folder):
    """Return the sdist of the last commit, and the wheel that is made from it."""
    changed = run("git", "status", "--porcelain", cwd=ROOT)
    if changed:
        sys.exit(f"{changed}commit these first: a release is made of a commit")
    run("git", "clone", "--quiet", ROOT, folder)
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, folder)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    return next(DIST.glob("*.tar.gz")), next(DIST.glob("*.whl"))


def check_contents(sdist, wheel):
    """Compare both with what git has."""
    committed = set(run("git", "ls-files", cwd=ROOT).splitlines())
    with tarfile.open(str(sdist)) as archive:
        files = {each.name.partition("/")[2] for each in archive if each.isfile()}
    made = {name for name in files if name.startswith("synkhronos.egg-info/")}
    compare(sdist, files - made, committed | {"PKG-INFO", "setup.cfg"})
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {name for name in committed if name.startswith("synkhronos/")}
    support = {"_synkhronos_import_support.py", "synkhronos-import-support.pth"}
    compare(wheel, files, {name for name in package | support if not name.endswith("/conftest.py")})


def compare(path, files, expected):
    size = path.stat().st_size
    if files != expected or size > LARGEST[path.suffix]:
        sys.exit(f"{path.name} has {size} bytes, and other files: {sorted(files ^ expected)}")
    print(f"{path.name}: {size // 1000} KB, {len(files)} files, as in git")


def build_docs(sdist, folder):
    """Build the documentation from the unpacked sdist, which needs all of its folders."""
    with tarfile.open(str(sdist)) as archive:
        archive.extractall(str(folder))
    source = next(folder.iterdir())
    options = ("-W", "--keep-going", "-q", "-b", "html")
    environment = {**os.environ, "PYTHONPATH": str(source)}
    run(sys.executable, "-m", "sphinx", *options, "docs", "built", cwd=source, env=environment)
    print("documentation: built from the sdist")


def try_on(version, wheel, folder):
    """Install the wheel in a new environment, and run the README's first example there."""
    find = subprocess.run(
        [str(ROOT / ".ci" / "find-python"), version],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if find.returncode:
        print(f"Python {version}: not here, so not tried")
        return
    own = ("SYNKHRONOS_", "PYTHON", "THEANO", "PYTENSOR")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    for host in ("THEANO", "PYTENSOR"):
        environment[f"{host}_FLAGS"] = f"base_compiledir={folder / 'compiled'}"
    python = folder / "bin" / "python"
    run(find.stdout.strip(), "-m", "venv", folder)
    here = {"cwd": folder, "env": environment}
    run(python, "-m", "pip", "install", "--quiet", wheel, **here)
    run(python, "-m", "pip", "check", **here)
    run(folder / "bin" / "synkhronos", "info", **here)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code, output = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", readme, re.S).groups()
    printed = run(python, "-c", code, **here)
    if printed != output:
        sys.exit(f"on Python {version} the README's example prints\n{printed}")
    print(f"Python {version}: installed; synkhronos info and the README's example work", flush=True)


def main(versions):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        sdist, wheel = build(folder / "clone")
        check_contents(sdist, wheel)
        build_docs(sdist, folder / "unpacked")
        for version in versions:
            try_on(version, wheel, folder / version)
            shutil.rmtree(str(folder / version), ignore_errors=True)
    if "/OWNER/" in (ROOT / "setup.py").read_text(encoding="utf-8"):
        print("Before an upload, fill in URL in setup.py.")
    print(f"sha256 of {sdist.name}: {hashlib.sha256(sdist.read_bytes()).hexdigest()}")
    tag = "v" + wheel.name.split("-")[1]
    print(f"git tag {tag} && git push origin {tag} && {sys.executable} -m twine upload dist/*")


if __name__ == "__main__":
    last = PYTHONS["PYTENSOR"][1][1]
    main(sys.argv[1:] or [f"3.{minor}" for minor in range(PYTHONS["THEANO"][0][1], last + 1)])
