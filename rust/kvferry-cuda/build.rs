//! Compiles the kernels where there is an `nvcc`, into one file for all devices that the crate embeds, and
//! for the host where the feature asks for it.
//!
//! A build without `nvcc` succeeds, says so, and leaves the reason where `available()` finds it. With
//! `KVFERRY_NVCC` set, a compiler that fails is an error; set to nothing, it asks for no kernels.

use std::env;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What decides which compiler is found.
const VARIABLES: [&str; 6] =
    ["KVFERRY_NVCC", "PATH", "CUDA_HOME", "PYO3_PYTHON", "VIRTUAL_ENV", "PYTHONPATH"];
/// Architectures that get code of their own; later ones compile the portable form when they load it.
const ARCHITECTURES: [&str; 3] = ["80", "90", "100"];
const PORTABLE_ARCHITECTURE: &str = "80";
/// Releases of CUDA whose compilers know all of these, and whose code drivers for CUDA 13.0 take.
const RELEASES: RangeInclusive<(u32, u32)> = (12, 8)..=(13, 0);
/// Prints where the compiler's package lies, whatever path the interpreter finds packages by.
const FIND_PACKAGE: &str = "import importlib.util as u; s = u.find_spec('nvidia'); \
     print('\\n'.join(s.submodule_search_locations if s else ()))";

fn main() {
    let cuda = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cuda");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    println!("cargo::rerun-if-changed={}", cuda.display());
    println!("cargo::rerun-if-changed=build.rs");
    for variable in VARIABLES {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    println!("cargo::rustc-check-cfg=cfg(kernels, disassembler)");
    let image = out.join("kernels.fatbin");
    match find_nvcc().and_then(|nvcc| compile(&nvcc, &cuda, &image).map(|()| nvcc)) {
        Ok(nvcc) => {
            println!("cargo::rustc-cfg=kernels");
            println!("cargo::rustc-env=KVFERRY_KERNELS={}", image.display());
            println!("cargo::rustc-env=KVFERRY_KERNELS_LOG={}", log(&image).display());
            println!("cargo::rustc-env=KVFERRY_BUILT_WITH_NVCC={}", nvcc.display());
            // Drivers take what a compiler of their release or an earlier one has made.
            let (major, minor) = release(&nvcc).unwrap_or(*RELEASES.end());
            println!("cargo::rustc-env=KVFERRY_OLDEST_DRIVER={}", 1000 * major + 10 * minor);
            if let Some(cuobjdump) =
                on_path("cuobjdump").chain([nvcc.with_file_name("cuobjdump")]).find(|f| f.is_file())
            {
                println!("cargo::rustc-cfg=disassembler");
                println!("cargo::rustc-env=KVFERRY_CUOBJDUMP={}", cuobjdump.display());
            }
        }
        Err(reason) => {
            let is_asked_for = env::var_os("KVFERRY_NVCC").is_some_and(|nvcc| !nvcc.is_empty());
            assert!(!is_asked_for, "KVFERRY_NVCC is set, but {reason}");
            println!("cargo::warning=built without CUDA kernels: {reason}");
            println!("cargo::rustc-env=KVFERRY_WITHOUT_KERNELS={reason}");
        }
    }
    #[cfg(feature = "emulated")]
    emulate(&cuda, &out);
}

/// Compiles the kernels for the host twice: into the crate, and behind the functions of a driver, as a library
/// that takes the place of the real one.
#[cfg(feature = "emulated")]
fn emulate(cuda: &Path, out: &Path) {
    let kernels = cuda.join("emulated/kernels.cpp");
    let driver = ["devices.cpp", "faults.cpp", "memory.cpp", "streams.cpp"]
        .map(|file| cuda.join("emulated/driver").join(file));
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(1).include(cuda.join("include"));
    build.clone().file(&kernels).compile("kvferry_emulated");
    let library = out.join("libcuda.so");
    let mut link = build.pic(true).get_compiler().to_command();
    let status = link
        .args(["-shared", "-Wl,-soname,libcuda.so", "-o"])
        .arg(&library)
        .arg(kernels)
        .args(driver)
        .status();
    assert!(status.is_ok_and(|status| status.success()), "the emulated driver cannot be built");
    println!("cargo::rustc-env=KVFERRY_EMULATED_DRIVER={}", library.display());
}

/// The compiler: the one that is named, or else the first of a release that will do on the path, in the
/// toolkit, or in the packages of the Python that builds.
fn find_nvcc() -> Result<PathBuf, String> {
    if let Some(nvcc) = env::var_os("KVFERRY_NVCC") {
        return if nvcc.is_empty() {
            Err("KVFERRY_NVCC is empty, which asks for none".to_owned())
        } else {
            Ok(nvcc.into())
        };
    }
    let in_toolkit = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    let installed = on_path("nvcc").chain(in_toolkit).filter(|nvcc| nvcc.is_file());
    let packaged = pythons().into_iter().filter_map(|python| in_packages(&python));
    let mut passed_over = Vec::new();
    for nvcc in installed.chain(packaged) {
        match release(&nvcc) {
            Some(release) if RELEASES.contains(&release) => return Ok(nvcc),
            Some((major, minor)) => passed_over.push(format!(" ({} is of {major}.{minor})", nvcc.display())),
            None => passed_over.push(format!(" ({} says of none)", nvcc.display())),
        }
    }
    let ((oldest, older), (newest, newer)) = (RELEASES.start(), RELEASES.end());
    Err(format!(
        "there is no nvcc of CUDA {oldest}.{older} to {newest}.{newer} on the PATH, in CUDA_HOME or in Python's \
         packages (nvidia-cuda-nvcc){}",
        passed_over.concat()
    ))
}

/// The release of CUDA that a compiler says it is of.
fn release(nvcc: &Path) -> Option<(u32, u32)> {
    let output = Command::new(nvcc).arg("--version").output().ok()?;
    let said = String::from_utf8(output.stdout).ok()?;
    let (major, minor) = said.split("release ").nth(1)?.split(',').next()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Where a program would be on the path.
fn on_path(program: &str) -> impl Iterator<Item = PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).map(|folder| folder.join(program)).collect::<Vec<_>>().into_iter()
}

fn pythons() -> Vec<PathBuf> {
    let named = env::var_os("PYO3_PYTHON").map(PathBuf::from);
    let active = env::var_os("VIRTUAL_ENV").map(|venv| Path::new(&venv).join("bin/python"));
    named.into_iter().chain(active).chain([PathBuf::from("python3")]).collect()
}

fn in_packages(python: &Path) -> Option<PathBuf> {
    let output = Command::new(python).args(["-c", FIND_PACKAGE]).output().ok()?;
    let folders = String::from_utf8(output.stdout).ok()?;
    folders.lines().map(|folder| Path::new(folder).join("cu13/bin/nvcc")).find(|nvcc| nvcc.is_file())
}

/// Compiles the kernels, unless `image` was made of the same sources by the same compiler.
fn compile(nvcc: &Path, cuda: &Path, image: &Path) -> Result<(), String> {
    let source = cuda.join("src/kernels.cu");
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-O3", "-std=c++17", "-Xfatbin", "-compress-all", "-Xptxas", "-v"]);
    for architecture in ARCHITECTURES {
        command.arg(format!("-gencode=arch=compute_{architecture},code=sm_{architecture}"));
    }
    command
        .arg(format!("-gencode=arch=compute_{PORTABLE_ARCHITECTURE},code=compute_{PORTABLE_ARCHITECTURE}"));
    command.arg("-I").arg(cuda.join("include")).arg("-o").arg(image).arg(&source);
    let stamp = image.with_extension("stamp");
    let made_of = format!("{command:?}\n{}", sources(cuda));
    if image.is_file() && fs::read_to_string(&stamp).is_ok_and(|before| before == made_of) {
        return Ok(());
    }
    let output = command.output().map_err(|error| format!("{} cannot be run: {error}", nvcc.display()))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).replace('\n', " | ");
        return Err(format!("{} failed: {message}", nvcc.display()));
    }
    let written = fs::write(log(image), output.stderr).and_then(|()| fs::write(stamp, made_of));
    written.map_err(|error| error.to_string())
}

/// What the compiler says about registers and spills.
fn log(image: &Path) -> PathBuf {
    image.with_extension("log")
}

/// The text of everything that the kernels are made of.
fn sources(cuda: &Path) -> String {
    let mut files: Vec<PathBuf> = ["include/kvferry", "src"]
        .iter()
        .flat_map(|folder| fs::read_dir(cuda.join(folder)).into_iter().flatten().flatten())
        .map(|entry| entry.path())
        .collect();
    files.sort();
    files.iter().filter_map(|file| fs::read_to_string(file).ok()).collect()
}
