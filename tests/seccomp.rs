//! The engine ladder under a seccomp filter like a container's: the child process may not set a
//! ring up, falls to the thread pool, reads correctly and can say why.

use std::process::Command;

use drivetrain::memory::Buffer;
use drivetrain::runtime::block_on;
use drivetrain::storage::local::{EngineChoice, EngineKind, LocalOptions, LocalStore, probe};
use drivetrain::storage::{OpenOptions, Store};

/// Set in the child: the errno its filter answers with.
const CHILD_ENV: &str = "DRIVETRAIN_TEST_SECCOMP_ERRNO";

/// Forbids the three io_uring calls in this process from now on.
fn forbid_io_uring(errno: u32) {
    let ret = |value| libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: value };
    let jump_if = |nr: libc::c_long, jt| libc::sock_filter { code: 0x15, jt, jf: 0, k: nr as u32 };
    let mut filter = [
        // Load the system call's number, which is the first field of the data.
        libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: 0 },
        jump_if(libc::SYS_io_uring_setup, 3),
        jump_if(libc::SYS_io_uring_enter, 2),
        jump_if(libc::SYS_io_uring_register, 1),
        ret(libc::SECCOMP_RET_ALLOW),
        ret(libc::SECCOMP_RET_ERRNO | errno),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its filter outlive the calls, which only read them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let flags = libc::SECCOMP_FILTER_FLAG_TSYNC;
        let done = libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            &raw const program,
        );
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    }
}

/// The child's part; does nothing in an ordinary run.
#[test]
fn child() {
    let Ok(errno) = std::env::var(CHILD_ENV) else { return };
    let errno: i32 = errno.parse().unwrap();
    forbid_io_uring(errno as u32);

    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("file"), b"0123456789").unwrap();
    let store = LocalStore::new(root.path(), LocalOptions::default()).unwrap();
    assert_eq!(store.engine_kind().unwrap(), EngineKind::Threads);
    let read = block_on(async {
        let file = store.open("file", OpenOptions::default()).await.unwrap();
        let mut buf = Buffer::heap(4);
        buf.set_len(4);
        file.read_at(3, buf).await.unwrap()
    });
    assert_eq!(&read.unwrap()[..], b"3456");
    assert_eq!((store.counters().thread_reads, store.counters().uring_reads), (1, 0));

    let report = probe();
    let word = if errno == libc::ENOSYS { "ENOSYS" } else { "seccomp" };
    assert!(!report.io_uring && report.io_uring_reason.contains(word), "{report:?}");
    assert!(!report.io_uring_advice.is_empty());
    let options = LocalOptions { engine: EngineChoice::Uring, ..LocalOptions::default() };
    let refused = LocalStore::new(root.path(), options).unwrap().engine_kind().unwrap_err();
    assert!(refused.to_string().contains(word), "{refused}");
    println!("child is done");
}

#[test]
fn without_io_uring_the_ladder_falls_to_threads_and_says_why() {
    for errno in [libc::EPERM, libc::ENOSYS] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "seccomp::child", "--nocapture", "--test-threads=1"])
            .env(CHILD_ENV, errno.to_string())
            .env_remove("DRIVETRAIN_IO_ENGINE")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}\n{errors}");
        assert!(said.contains("child is done"), "{said}\n{errors}");
    }
}
