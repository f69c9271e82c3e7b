#include "segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

namespace lagom {
namespace {

constexpr uint64_t MAGIC = 0x6c61676f6d736d31;  // "lagomsm1"
constexpr uint32_t VERSION = 1;
constexpr size_t PAGE = 4096;

size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }
size_t start_of_slots(size_t size) {
    return pages(sizeof(Head) + 3 * size * sizeof(Counter) + 2 * size * sizeof(Call));
}
size_t bytes_of_mail(size_t mail_bytes) { return pages(sizeof(Mail) + 2 * (64 + mail_bytes)); }

[[noreturn]] void fail(const char* what) {
    throw Failure(std::string(what) + ": " + std::strerror(errno));
}

// Creates an unnamed file for this user only: in memory, or on disk if memfd_create is forbidden, as in some
// containers.
int nameless_file(size_t num_bytes) {
    constexpr unsigned CLOEXEC = 1, NOEXEC_SEAL = 8;
    int fd = int(syscall(SYS_memfd_create, "lagom", CLOEXEC | NOEXEC_SEAL));
    if (fd < 0) fd = int(syscall(SYS_memfd_create, "lagom", CLOEXEC));  // before Linux 6.3
    if (fd >= 0) {
        if (fchmod(fd, 0600) == 0 && ftruncate(fd, off_t(num_bytes)) == 0) return fd;
        close(fd);
        fail("no shared memory");
    }
    const char* const chosen = std::getenv("TMPDIR");
    for (const char* folder : {"/dev/shm", chosen == nullptr ? "/tmp" : chosen, "/tmp"}) {
        fd = open(folder, O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
        // Reserve the whole file: writing to a mapped page for which the disk has no room would kill a rank.
        if (fd >= 0 && posix_fallocate(fd, 0, off_t(num_bytes)) == 0) return fd;
        if (fd >= 0) close(fd);
    }
    throw Failure("neither memfd_create nor a file in /dev/shm, TMPDIR or /tmp gives shared memory");
}

}  // namespace

size_t Segment::bytes_for(int size, size_t slot_bytes, size_t mail_bytes) {
    return start_of_slots(size) + 2 * size * slot_bytes + size_t(size) * size * bytes_of_mail(mail_bytes);
}

int Segment::create(int size, size_t slot_bytes, size_t mail_bytes) {
    if (size < 1 || slot_bytes % PAGE || slot_bytes < 512 * size_t(size + 1) || mail_bytes % 64 || mail_bytes == 0)
        throw Failure("a segment needs ranks, slots of whole pages with 512 bytes for each rank, and mail of 64 bytes");
    const int fd = nameless_file(bytes_for(size, slot_bytes, mail_bytes));
    void* base = mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        close(fd);
        fail("no shared memory");
    }
    Head* head = new (base) Head{};
    head->size = uint32_t(size);
    head->version = VERSION;
    head->slot_bytes = slot_bytes;
    head->mail_bytes = mail_bytes;
    head->magic = MAGIC;
    munmap(base, PAGE);
    return fd;
}

Segment::Segment(int fd, int size) : size_(size) {
    struct stat found;
    if (fstat(fd, &found) != 0) fail("shared memory");
    if (size < 1 || size_t(found.st_size) < sizeof(Head)) throw Failure("this is no segment of lagom's");
    num_bytes_ = size_t(found.st_size);
    void* base = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) fail("mapping shared memory");
    base_ = static_cast<char*>(base);
    slot_bytes_ = head().slot_bytes;
    mail_bytes_ = head().mail_bytes;
    if (head().magic != MAGIC || head().version != VERSION || int(head().size) != size ||
        bytes_for(size, slot_bytes_, mail_bytes_) != num_bytes_) {
        munmap(base, num_bytes_);
        throw Failure("this is no segment of lagom's for " + std::to_string(size) + " ranks and version " +
                      std::to_string(VERSION));
    }
    slots_ = base_ + start_of_slots(size);
    mails_ = slots_ + 2 * size * slot_bytes_;
    // A process forked from a rank must not hold the memory, nor touch it.
    madvise(base, num_bytes_, MADV_DONTFORK);
}

Segment::~Segment() {
    if (base_ != nullptr) munmap(base_, num_bytes_);
}

Mail& Segment::mail(int from, int to) {
    return *reinterpret_cast<Mail*>(mails_ + (size_t(from) * size_ + to) * bytes_of_mail(mail_bytes_));
}

Chunk& Segment::chunk(int from, int to, uint32_t number) {
    char* start = reinterpret_cast<char*>(&mail(from, to)) + sizeof(Mail);
    return *reinterpret_cast<Chunk*>(start + (number & 1) * (64 + mail_bytes_));
}

}  // namespace lagom
