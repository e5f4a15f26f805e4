"""Build of the compiled modules: the kernel table, per-file flags, probes and switches.

Every `syncer/**/*.pyx` becomes an extension module; `syncer.kernels._native` alone links csrc/.
Each kernel file is compiled with its own flags into an object of that module, for the machine the
build is *for*; a machine that is not in the table gets the portable kernels.

Switches (environment):
  SYNCER_SANITIZE=address,undefined   sanitizers in every object
  SYNCER_DEBUG_DIRECTIVES=1           Cython bounds, wrap-around and None checks back on, symbols
  SYNCER_COVERAGE=1                   gcov in every object, and nothing optimized away
  SYNCER_NO_OPENMP=1                  the serial twin of every parallel pass

`setup.py harness` builds build/harness-MACHINE instead: the kernels with csrc/harness.c as a static
program for a host without Python.

An incremental build redoes what changed: a .pyx or .pxd (Cython's own dependencies), a .c or .h of
csrc, a switch, the compiler or its flags.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
COMMON_FLAGS = ["-std=c11", "-fvisibility=hidden", "-Wall",
                "-g0"]  # Python's own flags may ask for debug symbols: four times the size
# After everything else, also what the environment asks for, and when linking, too: a module that is
# linked with -ffast-math turns subnormals off for the whole process that loads it. What cannot be
# taken back is an error of csrc/syncer_kernels_impl.h.
EXACT_FLAGS = ["-fno-fast-math", "-fno-unsafe-math-optimizations", "-fno-finite-math-only",
               "-fno-associative-math", "-fno-reciprocal-math", "-fsigned-zeros",
               "-ffp-contract=off", "-fno-math-errno"]
KERNEL_FLAGS = ["-O3", "-Wextra", "-fno-strict-aliasing"]
MODULE_FLAGS = ["-Wno-unused-function"]  # Cython writes converters that nothing may need
KERNELS_MODULE = "syncer.kernels._native"

# (file, extra flags) by target machine; "any" is compiled everywhere.
KERNELS = {
    "any": [
        ("cpu.c", []),
        ("dispatch.c", []),
        ("float_mode.c", []),
        ("sha256.c", []),
        ("sha256_portable.c", []),
        ("codec_portable.c", []),
        ("blend_portable.c", []),
        ("reduce_portable.c", []),
        ("arrays.c", ["openmp"]),
        ("changes.c", ["openmp"]),
        ("check.c", []),
        ("check_faint.c", []),
        ("merge_fragment.c", ["openmp"]),
        ("merge_threads.c", ["openmp"]),
        ("merge_places.c", []),
        ("merge_correct.c", []),
        ("merge_trim.c", []),
        ("merge_fold.c", []),
        ("merge_stats.c", []),
    ],
    "x86_64": [
        ("sha256_x86_shani.c", ["-msse4.1", "-msha"]),
        ("codec_x86_avx2.c", ["-mavx2"]),  # not -mfma: the compiler would fuse intrinsics too
        ("blend_x86_avx2.c", ["-mavx2"]),
        ("blend_x86_avx2_faint.c", ["-mavx2"]),
        ("reduce_x86_avx2.c", ["-mavx2"]),
    ],
    "aarch64": [
        # GCC 12 takes +crypto, not +sha2, for these intrinsics
        ("sha256_arm_sha2.c", ["-march=armv8-a+crypto"]),
        ("codec_arm_neon.c", []),
        ("codec_arm_bf16.c", ["-march=armv8.2-a+bf16"]),
        ("blend_arm_neon.c", []),
        ("reduce_arm_neon.c", []),
    ],
}
MACHINES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "nonecheck": False,
    "cdivision": True,
    "embedsignature": True,
}


def switch(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def directives() -> dict:
    chosen = dict(DIRECTIVES)
    if switch("SYNCER_DEBUG_DIRECTIVES"):
        chosen.update(boundscheck=True, wraparound=True, initializedcheck=True, nonecheck=True)
    return chosen


def key_of(*facts) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def extensions() -> list:
    try:
        import Cython
        from Cython.Build import cythonize
    except ImportError:
        sys.exit("syncer: Cython is missing; install it with: pip install cython")
    covered = switch("SYNCER_COVERAGE")
    modules = []
    for source in sorted((ROOT / "syncer").rglob("*.pyx")):
        relative = source.relative_to(ROOT)
        name = ".".join(relative.with_suffix("").parts)
        modules.append(Extension(name, [str(relative)], include_dirs=["csrc"],
                                 extra_compile_args=["-O0" if covered else "-O2", *MODULE_FLAGS]))
    # Cython compares times, not directives: C made with other ones lives in another folder.
    made = f"build/cython-{key_of(Cython.__version__, sorted(directives().items()))}"
    return cythonize(modules, compiler_directives=directives(), build_dir=made, quiet=True)


class BuildExt(build_ext):
    """Compiles the kernel table and adds its objects to the one module that links them."""

    def build_extensions(self):
        self.check_toolchain()
        self.openmp = self.probe_openmp()
        switches = self.switch_flags()
        flags = COMMON_FLAGS + switches
        self.force = self.force or self.flags_changed(flags)
        self.parallel = self.parallel or os.cpu_count()
        headers = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc").glob("*.h"))]
        for extension in self.extensions:
            optimized = [f for f in extension.extra_compile_args if f.startswith("-O")]
            extension.extra_compile_args = flags + extension.extra_compile_args + EXACT_FLAGS
            extension.extra_link_args += switches + optimized + EXACT_FLAGS  # not -Ofast either
            if extension.name == KERNELS_MODULE:
                objects = self.compile_kernels(flags)
                extension.depends += headers + objects  # newer than the module: link again
                extension.extra_objects += objects
                extension.extra_link_args += self.openmp
        super().build_extensions()

    def switch_flags(self) -> list[str]:
        flags = []
        if sanitizers := os.environ.get("SYNCER_SANITIZE"):
            flags += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g",
                      "-fno-sanitize-recover=undefined"]
        if switch("SYNCER_COVERAGE"):
            flags += ["--coverage"]
        if switch("SYNCER_DEBUG_DIRECTIVES"):
            flags += ["-g"]
        return flags

    def flags_changed(self, flags: list[str]) -> bool:
        """Whether the last build here used another compiler or flags; remembers these."""
        stamp = Path(self.build_temp) / "flags"
        now = repr((self.compiler.compiler_so, self.compiler.linker_so, flags, self.openmp,
                    sorted(directives().items())))
        before = stamp.read_text() if stamp.exists() else now
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(now)
        return before != now

    def target_machine(self) -> str:
        return MACHINES.get(self.plat_name.rsplit("-", 1)[-1].lower(), "other")

    def compile_kernels(self, flags: list[str], more: list = ()) -> list[str]:
        build_dir = Path(self.build_temp) / "csrc"
        build_dir.mkdir(parents=True, exist_ok=True)
        newest_header = max(p.stat().st_mtime for p in (ROOT / "csrc").glob("*.h"))

        def compile_one(entry) -> str:
            path = ROOT / "csrc" / entry[0]
            own = [f for flag in entry[1] for f in (self.openmp if flag == "openmp" else [flag])]
            target = build_dir / (path.stem + ".o")
            command = [*self.compiler.compiler_so, *flags, *KERNEL_FLAGS, *own, *EXACT_FLAGS, "-c",
                       str(path)]
            stamp = build_dir / (path.stem + ".cmd")
            fresh = (
                target.exists() and not self.force
                and stamp.exists() and stamp.read_text() == repr(command)
                and target.stat().st_mtime > max(path.stat().st_mtime, newest_header)
            )
            if not fresh:
                partial = build_dir / f"{path.stem}.{os.getpid()}.o"  # a cut build leaves no object
                if subprocess.run([*command, "-o", str(partial)], check=False).returncode:
                    sys.exit(f"syncer: {path.relative_to(ROOT)} does not compile; "
                             f"the command was: {' '.join(command)}")
                partial.replace(target)
                stamp.write_text(repr(command))
            return str(target)

        machine = self.target_machine()
        table = [*KERNELS["any"], *KERNELS.get(machine, []), *more]
        if machine not in KERNELS:
            flags = [*flags, "-DSK_PORTABLE_ONLY"]
            print(f"syncer: no kernels for {self.plat_name} but the portable ones")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(compile_one, table))

    def check_toolchain(self):
        """A missing compiler or header ends the build with a sentence that says what to install."""
        compiler = self.compiler.compiler_so[0]
        try:
            subprocess.run([compiler, "--version"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            sys.exit(f"syncer: no C compiler ({compiler!r} cannot be run); install one, for "
                     "example with: apt-get install gcc   (or: dnf install gcc)")
        include_dirs = [*self.compiler.include_dirs, *self.include_dirs,
                        sysconfig.get_paths()["include"]]
        command = [*self.compiler.compiler_so, *(f"-I{d}" for d in include_dirs), "-E", "-xc", "-"]
        probe = subprocess.run(command, input=b"#include <Python.h>\n", capture_output=True,
                               check=False)
        if probe.returncode:
            sys.exit("syncer: the headers of this Python (Python.h) are missing; install them, for "
                     "example with: apt-get install python3-dev   (or: dnf install python3-devel)")

    def probe_openmp(self) -> list[str]:
        """`-fopenmp` if a program with it compiles, links and (when not cross-compiling) runs."""
        if switch("SYNCER_NO_OPENMP"):
            return []
        native = self.target_machine() == os.uname().machine
        with tempfile.TemporaryDirectory() as scratch:
            source, program = Path(scratch) / "probe.c", Path(scratch) / "probe"
            source.write_text("#include <omp.h>\nint main(void) {int n = 0;\n"
                              "#pragma omp parallel num_threads(2) reduction(+ : n)\n n += 1;\n"
                              "return n < 1 || omp_get_max_threads() < 1;}\n")
            command = [self.compiler.compiler_so[0], "-fopenmp", str(source), "-o", str(program)]
            try:
                subprocess.run(command, check=True, capture_output=True)
                if native:
                    subprocess.run([str(program)], check=True, capture_output=True, timeout=30)
            except (OSError, subprocess.SubprocessError):
                print("syncer: the compiler has no working OpenMP; merges will use one thread")
                return []
        return ["-fopenmp"]


class BuildHarness(BuildExt):
    """Links the kernel table with csrc/harness.c into a program."""

    description = "build the kernel self-check as a static program"

    def run(self):
        self.extensions = [Extension("harness", [])]  # build_ext sets no compiler up for nothing
        super().run()

    def build_extensions(self):
        self.check_toolchain()
        self.openmp = self.probe_openmp()
        switches = self.switch_flags()
        self.build_temp = str(Path(self.build_temp).parent / f"harness-{key_of(switches)}")
        objects = self.compile_kernels(COMMON_FLAGS + switches, [("harness.c", [])])
        program = ROOT / "build" / f"harness-{self.target_machine()}"
        static = [] if switches else ["-static"]  # a sanitizer's runtime is a shared library
        command = [self.compiler.compiler_so[0], *switches, *static, *objects, *self.openmp, "-lm",
                   *EXACT_FLAGS, "-o", str(program)]
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"syncer: the harness does not link; the command was: {' '.join(command)}")
        print(program.relative_to(ROOT))


# Neither the harness nor a source distribution needs C made by Cython.
setup(ext_modules=[] if {"harness", "sdist"} & set(sys.argv) else extensions(),
      cmdclass={"build_ext": BuildExt, "harness": BuildHarness})
