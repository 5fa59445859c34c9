"""Let the CUDA build of torch from PyPI be imported on a machine without a GPU.

The wheel's libraries are linked against some 3 GB of CUDA libraries which a CPU never calls. This
script links one small library per missing name, exporting just the symbols that torch wants; each
returns 1, which every CUDA API reads as an error, so `torch.cuda.is_available()` is False. It is
run by scripts/setup.sh where no NVIDIA driver is found. Needs gcc, readelf and nm.
"""

import collections
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

CUDA_PREFIXES = ("cu", "nccl", "nv")


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed_names(library):
    return set(re.findall(r"NEEDED.*\[(.+?)\]", output_of("readelf", "-dW", str(library))))


def read_symbols(libraries):
    """Returns (version or "" -> wanted names, defined names)."""
    wanted, defined = collections.defaultdict(set), set()
    for library in libraries:
        for line in output_of("nm", "-D", "--with-symbol-versions", str(library)).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            if kind in "Uwv":
                wanted[version.lstrip("@")].add(name)
            else:
                defined.add(name)
    return wanted, defined


def versions_for(soname, wanted, loose):
    """Version node -> symbols that a stub of this name must export."""
    stem = soname.split(".so")[0].removeprefix("lib")
    if soname in wanted:
        nodes = {soname: set(wanted[soname])}
    elif stem == "nvshmem_host":
        nodes = {v: set(s) for v, s in wanted.items() if v.upper().startswith("NVSHMEM")}
    else:
        nodes = {}
    prefix = {"cufile": "cuFile", "nvshmem_host": "nvshmem"}.get(stem, stem)
    unversioned = {s for s in loose if s.startswith(prefix)}
    if nodes:
        next(iter(nodes.values())).update(unversioned)
    else:
        nodes[""] = unversioned
    return nodes


def link_stub(path, soname, nodes):
    symbols = sorted(set().union(*nodes.values()))
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "stub.c")
        body = "".join(f"int {s}(void){{return 1;}}\n" for s in symbols)
        source.write_text("int drivetrain_stub(void){return 1;}\n" + body)
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{soname}"]
        named = {v: s for v, s in nodes.items() if v}
        if named:
            script = pathlib.Path(folder, "stub.map")
            script.write_text(
                "".join(f"{v} {{ global: {'; '.join(sorted(s))}; }};\n" for v, s in named.items())
            )
            command.append(f"-Wl,--version-script={script}")
        subprocess.run([*command, "-o", str(path), str(source)], check=True)


def main():
    site = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_paths()["purelib"])
    folder = site / "torch" / "lib"
    libraries = [p for p in folder.glob("*.so*") if p.is_file()]
    have = {p.name for p in site.rglob("*.so*")}
    system = output_of("/sbin/ldconfig", "-p")
    needed = set().union(*(needed_names(p) for p in libraries))
    missing = sorted(
        n
        for n in needed
        if n not in have and f"{n} " not in system and not n.startswith(("ld-linux", "libcuda.so"))
    )
    wanted, defined = read_symbols(libraries)
    loose = {s for s in wanted[""] if s not in defined and s.startswith(CUDA_PREFIXES)}
    for soname in missing:
        link_stub(folder / soname, soname, versions_for(soname, wanted, loose))
    print(f"linked {len(missing)} stand-ins for CUDA libraries")


main()
