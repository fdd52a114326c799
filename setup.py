"""The extensions; everything else is in pyproject.toml.

SHMBRIDGE_FAULTS=1 compiles the labelled fail-points in, SHMBRIDGE_DEBUG=1 turns Cython's checks on,
SHMBRIDGE_EXTENSIONS=0 builds none, for an editable install: that compiles them elsewhere than in place.
"""

import os
from glob import glob

import numpy
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

try:
    from Cython.Build import cythonize
except ImportError:  # on a machine that has none: C sources that an earlier build left in build/generated
    cythonize = None

DEBUG = os.environ.get("SHMBRIDGE_DEBUG") == "1"
FAULTS = os.environ.get("SHMBRIDGE_FAULTS") == "1"
NONE = os.environ.get("SHMBRIDGE_EXTENSIONS") == "0"
EXT, BASELINES = "shmbridge/_ext", "bench/baselines"


def extension(name: str, *c_sources: str, package: str = "shmbridge._ext", folder: str = EXT) -> Extension:
    """One compiled module of a package, made from `folder`."""
    return Extension(
        f"{package}.{name}",
        [f"{folder}/{name}.pyx", *c_sources],
        include_dirs=[f"{EXT}/c", folder, numpy.get_include()],
        depends=glob(f"{EXT}/c/*.h") + glob(f"{EXT}/*.pxd") + glob(f"{folder}/*.h"),
        define_macros=[
            ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
            *([("SHMBRIDGE_FAULTS", "1")] if FAULTS else []),
        ],
        extra_compile_args=[
            "-std=gnu11",
            *([] if "-O" in os.environ.get("CFLAGS", "") else ["-O3"]),  # the builder's own wish wins
            "-Wall",
            "-Wno-unused-function",
            "-Wno-sign-compare",
            # Python's own flags ask for debug symbols: a third of the time to build, four fifths of the bytes
            *(["-g", "-O0"] if DEBUG else ["-g0"]),
        ],
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
    extension("mapping", f"{EXT}/c/fork.c"),
    *map(extension, ("header", "lane_writer", "lane_reader", "rank_reader", "lane_observer", "record")),
    *map(extension, ("lane_poller", "wait")),
    *map(extension, ("column", "pack", "plan", "fast_put", "row_check", "relayed")),
    *map(extension, ("blocks", "gather", "versions", "tensor_bytes")),
    extension("memcpy_baseline", package="shmbridge.bench.baselines", folder=BASELINES),
]
GENERATED = "build/generated"  # the same C with fail-points and without: they are macros
if NONE:
    EXTENSIONS = []
elif cythonize is not None:
    EXTENSIONS = cythonize(
        EXTENSIONS,
        compiler_directives={
            "language_level": "3",
            "boundscheck": DEBUG,
            "initializedcheck": DEBUG,
            "cdivision": True,
        },
        annotate=DEBUG,
        build_dir=GENERATED,
    )
else:
    for each in EXTENSIONS:
        each.sources = [
            f"{GENERATED}/{source[:-4]}.c" if source.endswith(".pyx") else source for source in each.sources
        ]

setup(
    cmdclass={"build_py": WithoutSuites},
    ext_modules=EXTENSIONS,
    options={"build_ext": {"parallel": len(os.sched_getaffinity(0))}},
)
