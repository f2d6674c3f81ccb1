//! The kernels, run on the host, against the host copier: every byte of all memory, guards included.

mod common;

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
