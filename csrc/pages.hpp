// Decodes the Parquet pages of a column chunk whose values all have one size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lagom {

// Decodes plain pages only: no nulls, no lists, PLAIN or dictionary encoding, uncompressed or snappy. All others give
// `unusual`: the caller then uses Arrow, which decodes them or reports the error. See Note [Pages of our own] in
// lagom/data/decoders/page_decoder.py.
class Pages {
  public:
    struct Kind {
        bool is_snappy;
        bool is_optional;    // values have a definition level, which must be 1
        bool is_bytes;       // BYTE_ARRAY: each value begins with its length
        std::string prefix;  // bytes that each value begins with, which are left out
        size_t size;         // bytes of a value without the prefix
        uint64_t count;      // number of values in the column chunk
        uint64_t most;       // largest number of bytes of a decompressed page
    };
    enum class Status { done = 0, starved = 1, unusual = 2 };
    struct Step {
        size_t used;  // number of given bytes that were used
        size_t rows;  // number of values that were decoded
        Status status;
        size_t wanted;  // number of further bytes that are needed, if `starved`
    };

    // The place of the values: `piece` values side by side, the next `piece` values `jump` bytes after the first of
    // them, and so on.
    struct Out {
        uint8_t* at;
        size_t piece;
        size_t jump;
    };

    // Begins another column chunk, in the same memory.
    void begin(Kind kind);

    // Decodes the next `rows` values into `out`, after the first `done` values there. `data` begins after the bytes
    // that earlier calls have used.
    Step read(const uint8_t* data, size_t size, Out out, size_t done, size_t rows);

  private:
    struct Header;

    bool open(const Header& header, const uint8_t* data, size_t size);
    bool has_values(const uint8_t* values, size_t size, size_t count) const;
    bool take(uint8_t* out, size_t rows);
    bool take_indexed(uint8_t* out, size_t rows);
    bool next_run();
    size_t stride() const { return (kind_.is_bytes ? 4 : 0) + kind_.prefix.size() + kind_.size; }
    size_t skipped() const { return (kind_.is_bytes ? 4 : 0) + kind_.prefix.size(); }

    Kind kind_{};
    uint64_t left_ = 0;                 // values of the chunk that have not been decoded
    std::vector<uint8_t> dictionary_;   // its values as they are stored
    size_t num_entries_ = 0;
    bool has_dictionary_ = false;
    std::vector<uint8_t> page_;         // decompressed; unused bytes at its end allow reads of 8 bytes
    size_t page_left_ = 0;              // values of the page that have not been decoded
    bool is_indexed_ = false;
    const uint8_t* at_ = nullptr;       // next byte of the page
    const uint8_t* end_ = nullptr;
    int bits_ = 0;                      // bits of an index
    size_t run_left_ = 0;               // indices of the run that have not been decoded
    bool run_repeats_ = false;
    uint32_t run_value_ = 0;
    size_t run_bit_ = 0;                // in a packed run, the first bit of the next index, counted from at_
    const uint8_t* run_end_ = nullptr;
};

}  // namespace lagom
