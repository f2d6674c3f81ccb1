//! A machine without a driver, or a build without kernels: everything says so, and nothing else happens.

use kvferry_core::Error;
use kvferry_core::memory::region::Region;
use kvferry_core::memory::tensor::Device;
use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::moves::schedule::{BlockTable, CopyLoop, Schedule};
use kvferry_core::moves::strided::Strided;
use kvferry_cuda::{Memory, Placed, Stream, available, copy};

#[test]
fn whatever_needs_a_device_says_what_is_missing() {
    let Err(reason) = available() else {
        eprintln!("skipped: this machine has a device");
        return;
    };
    let has_kernels = option_env!("KVFERRY_KERNELS").is_some();
    assert!(reason.contains(if has_kernels { "driver" } else { "no CUDA kernels" }), "{reason}");
    let device = Device { kind: Device::CUDA, index: 0 };
    let region = Region {
        name: "t".to_owned(),
        address: 0,
        extent_bytes: 16,
        block_stride: 16,
        device,
        writable: true,
    };
    let strided = Strided::new(16, []).unwrap();
    let (source_tensor, target_tensor, source_offset, target_offset) = (0, 0, 0, 0);
    let entries = 0..1;
    let copied = CopyLoop { source_tensor, target_tensor, source_offset, target_offset, strided, entries };
    let schedule = Schedule { loops: vec![copied], table: BlockTable { source: vec![0], target: vec![0] } };
    let regions = [region];
    let bound = BoundSchedule { schedule: &schedule, source: &regions, target: &regions };
    let (source, target) = (&Memory::default(), &Memory::default());
    // SAFETY: it is refused.
    let refused = unsafe { copy(&[Placed { bound, source, target }], Stream(0)) };
    assert_eq!(refused, Err(Error::Layout(format!("CUDA memory cannot be copied: {reason}"))));
    // SAFETY: there is nothing to copy.
    assert_eq!(unsafe { copy(&[], Stream(0)) }, Ok(()));
}
