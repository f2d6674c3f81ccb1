//! The kernels, run on the host, against the host copier: every byte of all memory, guards included.

mod common;

use kvferry_core::memory::region::Region;
use kvferry_core::memory::tensor::Device;
use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::moves::schedule::{BlockTable, CopyLoop, Schedule};
use kvferry_core::moves::strided::{Dim, Strided};
use kvferry_cuda::emulated::{self, Order, Scratch};
use proptest::prelude::*;

use crate::common::{Memory, Rows, copies, rows};

fn order() -> impl Strategy<Value = Order> {
    (1_u32..6, any::<bool>(), any::<bool>())
        .prop_map(|(blocks, is_small, is_backward)| Order::new(blocks, is_small, is_backward))
}

/// Repairs by the host copier and by kernels, each in memory of its own.
fn both_repaired(rows: &Rows, order: Order, scratch: Scratch) -> [Memory; 2] {
    let [mut host, mut device] = [(); 2].map(|()| Memory::new(rows.num_bytes, 1));
    // SAFETY: the memories hold the rows and are this test's alone.
    unsafe {
        kvferry_copy::repair(&rows.repair(host.address()), Some(1));
        emulated::repair(&rows.repair(device.address()), order, scratch).unwrap();
    }
    [host, device]
}

/// A tensor of two planes, more than 32 bits of bytes apart.
fn far_planes(memory: &mut [u8]) -> Region {
    let (name, extent_bytes) = ("tensor".to_owned(), memory.len() as u64);
    let address = memory.as_mut_ptr().expose_provenance() as u64;
    Region { name, address, extent_bytes, block_stride: 64, device: Device::CPU, writable: true }
}

#[test]
fn offsets_and_strides_exceed_32_bits() {
    const STRIDE: u64 = (4 << 30) + 64;
    const BLOCKS: u64 = 40;
    // Pages that nobody touches take no memory.
    let mut memories = [(); 2].map(|()| vec![0_u8; usize::try_from(STRIDE + (1 << 20)).unwrap()]);
    let blocks: Vec<u64> = (0..BLOCKS).map(|block| block * 64).collect();
    let far = |block: &u64| usize::try_from(STRIDE + block).unwrap();
    for block in &blocks {
        let number = u8::try_from(block / 64).unwrap();
        memories[0][usize::try_from(*block).unwrap()] = number;
        memories[0][far(block)] = number + 100;
    }
    let dim = Dim { count: 2, source_stride: STRIDE, target_stride: STRIDE };
    let table =
        BlockTable { target: blocks.iter().rev().map(|block| block + (1 << 16)).collect(), source: blocks };
    let copy = CopyLoop {
        source_tensor: 0,
        target_tensor: 0,
        source_offset: 0,
        target_offset: 0,
        strided: Strided::new(64, [dim]).unwrap(),
        entries: 0..table.source.len(),
    };
    let schedule = Schedule { loops: vec![copy], table };
    let [source, target] = memories.each_mut().map(|memory| [far_planes(memory)]);
    let bound = BoundSchedule { schedule: &schedule, source: &source, target: &target };
    // SAFETY: the memories hold the planes and are this test's alone.
    unsafe { emulated::copy(&[bound], Order::new(3, true, false)) }.unwrap();
    for (source, target) in schedule.table.source.iter().zip(&schedule.table.target) {
        let number = u8::try_from(source / 64).unwrap();
        assert_eq!(memories[1][usize::try_from(*target).unwrap()], number);
        assert_eq!(memories[1][far(target)], number + 100);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn kernels_copy_what_the_host_copies(copies in copies(), order in order()) {
        let mut source = Memory::new(copies.source_bytes, 1);
        let [mut host, mut device] = [(); 2].map(|()| Memory::new(copies.target_bytes, 2));
        let untouched = source.clone();
        let [on_host, on_device] =
            [&mut host, &mut device].map(|target| copies.regions(source.address(), target.address()));
        // SAFETY: the memories hold the tensors and are this test's alone.
        unsafe {
            kvferry_copy::copy(&copies.bound(&on_host), Some(1));
            emulated::copy(&copies.bound(&on_device), order).unwrap();
        }
        prop_assert!(source == untouched);
        prop_assert!(host == device);
    }

    #[test]
    fn kernels_repair_what_the_host_repairs(rows in rows(), order in order()) {
        let [host, device] = both_repaired(&rows, order, Scratch { shared_bytes: 48 << 10, device_bytes: 0 });
        prop_assert!(host == device);
    }

    #[test]
    fn matrices_that_do_not_fit_are_cut(rows in rows(), order in order(), shared_bytes in 0_u64..2048) {
        let [host, device] = both_repaired(&rows, order, Scratch { shared_bytes, device_bytes: 4096 });
        prop_assert!(host == device);
    }
}
