"""The extensions; everything else is in pyproject.toml.

SHMBRIDGE_FAULTS=1 compiles the labelled fail-points in, SHMBRIDGE_DEBUG=1 turns Cython's checks on,
SHMBRIDGE_EXTENSIONS=0 builds none, for an editable install: that compiles them elsewhere than in place.
"""

import multiprocessing
import os
import sys
from glob import glob
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

try:
    from Cython.Build import cythonize
except ImportError:  # on a machine that has none: C sources that an earlier build left in build/generated
    cythonize = None

sys.path.insert(0, str(Path(__file__).parent))  # not there in an isolated build
from package_page import package_page, repository

DEBUG = os.environ.get("SHMBRIDGE_DEBUG") == "1"
FAULTS = os.environ.get("SHMBRIDGE_FAULTS") == "1"
NONE = os.environ.get("SHMBRIDGE_EXTENSIONS") == "0"
EXT, BASELINES = "shmbridge/_ext", "shmbridge/bench/baselines"
COLD = ("groups", "header")  # compiled in half the time


def extension(name: str, *c_sources: str, package: str = "shmbridge._ext", folder: str = EXT) -> Extension:
    """One compiled module of a package, made from `folder`."""
    speed = "-O1" if name in COLD else "-O3"
    return Extension(
        f"{package}.{name}",
        [f"{folder}/{name}.pyx", *c_sources],
        include_dirs=[f"{EXT}/c", folder, numpy.get_include()],
        depends=glob(f"{EXT}/c/*.h") + glob(f"{EXT}/*.px[di]") + glob(f"{folder}/*.h"),
        define_macros=[
            ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
            *([("SHMBRIDGE_FAULTS", "1")] if FAULTS else []),
        ],
        extra_compile_args=[
            "-std=gnu11",
            *([] if "-O" in os.environ.get("CFLAGS", "") else [speed]),  # the builder's own wish wins
            "-Wall",
            "-Wno-unused-function",
            "-Wno-sign-compare",
            # Python's own flags ask for debug symbols: a third of the time to build, four fifths of the bytes
            *(["-g", "-O0"] if DEBUG else ["-g0"]),
        ],
        extra_link_args=[] if DEBUG else ["-Wl,--strip-all"],
    )


class WithoutSuites(build_py):
    """Measuring code is installed; the pytest suites that lie beside it are for a clone."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """(package, module, file) of what is installed."""
        return [
            each
            for each in super().find_package_modules(package, package_dir)
            if not each[1].startswith(("test_", "conftest"))
        ]


EXTENSIONS = [
    extension("header", f"{EXT}/c/fork.c"),
    *map(extension, ("lane", "put", "record", "groups", "weights")),
    extension("memcpy_baseline", package="shmbridge.bench.baselines", folder=BASELINES),
]
CORES = len(os.sched_getaffinity(0))
GENERATED = "build/generated"  # the same C with fail-points and without: they are macros
if NONE:
    EXTENSIONS = []
elif cythonize is not None:
    multiprocessing.set_start_method("fork", force=True)  # others run this file again in each process
    EXTENSIONS = cythonize(
        EXTENSIONS,
        compiler_directives={
            "language_level": "3",
            "boundscheck": DEBUG,
            "initializedcheck": DEBUG,
            "cdivision": True,
            "auto_pickle": False,  # code that nobody runs; RecordMeta asks for it
        },
        annotate=DEBUG,
        build_dir=GENERATED,
        nthreads=CORES,
    )
else:
    for each in EXTENSIONS:
        each.sources = [
            f"{GENERATED}/{source[:-4]}.c" if source.endswith(".pyx") else source for source in each.sources
        ]

# the longest first, so that no core is idle at the end
EXTENSIONS.sort(key=lambda each: os.path.getsize(each.sources[0]), reverse=True)

setup(
    long_description=package_page(Path(__file__).with_name("README.md").read_text(), repository()),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": WithoutSuites},
    ext_modules=EXTENSIONS,
    options={"build_ext": {"parallel": CORES}},
)
