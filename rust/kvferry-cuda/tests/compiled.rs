//! What the compiler made of the kernels: registers, spills, and how wide their accesses are.

use std::collections::BTreeMap;
use std::process::Command;
use std::{env, fs};

/// Registers of a thread at which four blocks of 256 fill a multiprocessor.
const MOST_REGISTERS: u32 = 64;
const KERNELS: [&str; 3] = ["kvferry_copy_loops", "kvferry_copy_runs", "kvferry_transpose"];
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90", "sm_100"];
/// Vectors that a thread reads before it writes one.
const UNROLL: usize = 4;

/// The file or program of this build, which there is where the test is not ignored.
fn built(path: Option<&'static str>) -> &'static str {
    path.expect("the build script says where it is")
}

/// What a program writes.
fn output(program: &mut Command) -> String {
    let output = program.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The number before these words.
fn number_before(text: &str, words: &str) -> u32 {
    let before = text.split(words).next().unwrap();
    before.rsplit([' ', '\n']).next().unwrap().parse().expect("a number in the compiler's log")
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn no_kernel_spills_or_needs_more_registers_than_there_are() {
    let log = fs::read_to_string(built(option_env!("KVFERRY_KERNELS_LOG"))).unwrap();
    let mut found = Vec::new();
    for entry in log.split("Compiling entry function '").skip(1) {
        let mut quoted = entry.split('\'');
        let (kernel, architecture) = (quoted.next().unwrap(), quoted.nth(1).unwrap());
        let registers = number_before(entry, " registers");
        let spilled = [" bytes spill stores", " bytes spill loads"].map(|what| number_before(entry, what));
        assert!(registers <= MOST_REGISTERS, "{kernel} on {architecture}: {registers} registers");
        assert_eq!(spilled, [0, 0], "{kernel} on {architecture} spills");
        found.push((kernel, architecture));
    }
    found.sort_unstable();
    let mut expected =
        KERNELS.map(|kernel| ARCHITECTURES.map(|architecture| (kernel, architecture))).concat();
    expected.sort_unstable();
    assert_eq!(found, expected);
}

#[test]
#[cfg_attr(not(kernels), ignore = "this build has no kernels: there was no nvcc")]
fn portable_code_reads_and_writes_128_bits_at_once() {
    let cuda = concat!(env!("CARGO_MANIFEST_DIR"), "/../../cuda");
    let mut nvcc = Command::new(built(option_env!("KVFERRY_BUILT_WITH_NVCC")));
    nvcc.args(["-ptx", "-O3", "-std=c++17", "-arch=compute_80", "-o", "-", "-I"]);
    let code = output(nvcc.arg(format!("{cuda}/include")).arg(format!("{cuda}/src/kernels.cu")));
    let entries = code.split(".visible .entry ").skip(1);
    let code: BTreeMap<&str, &str> = entries.map(|entry| (entry.split('(').next().unwrap(), entry)).collect();
    let (read, write) = ("ld.global.cs.v4.u32", "st.global.cs.v4.u32");
    for kernel in KERNELS {
        let count = |what: &str| code[kernel].matches(what).count();
        assert_eq!((count(read), count(write)), (UNROLL, UNROLL), "{kernel}");
        // What was written before on the stream must be seen: nothing comes from the read-only cache.
        assert_eq!((count("ld.global.nc"), count(".local")), (0, 0), "{kernel}");
    }
    for kernel in &KERNELS[..2] {
        let (last_read, first_write) = (code[kernel].rfind(read), code[kernel].find(write));
        assert!(last_read < first_write, "{kernel} writes before all its vectors are read");
    }
}

#[test]
#[cfg_attr(not(disassembler), ignore = "there is no cuobjdump beside nvcc or on the PATH")]
fn devices_code_reads_and_writes_128_bits_at_once() {
    let cuobjdump = built(option_env!("KVFERRY_CUOBJDUMP"));
    let folder = cuobjdump.rsplit_once('/').unwrap().0; // it starts `nvdisasm`, which lies beside it
    let path = format!("{folder}:{}", env::var("PATH").unwrap_or_default());
    for architecture in ARCHITECTURES {
        let mut disassemble = Command::new(cuobjdump);
        disassemble.env("PATH", &path).args(["-sass", "-arch", architecture]);
        let code = output(disassemble.arg(built(option_env!("KVFERRY_KERNELS"))));
        let kernels: Vec<&str> = code.split("Function : ").skip(1).collect();
        assert_eq!(kernels.len(), KERNELS.len(), "{architecture}");
        for (kernel, access) in kernels.iter().flat_map(|kernel| [(kernel, "LDG"), (kernel, "STG")]) {
            let (name, accesses) =
                (kernel.lines().next(), kernel.matches(&format!("{access}.E.EF.128")).count());
            assert!(accesses >= UNROLL, "{name:?} on {architecture}: {accesses} wide {access}");
        }
    }
}
