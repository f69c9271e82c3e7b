// Pages of Parquet: one column's part of a row group, whose values all have one size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lagom {

// Decodes the plain kind only: no nulls, no lists, PLAIN or in a dictionary, uncompressed or by snappy. Whatever else there is
// is `unusual`: who calls has another decoder for it, which says what is wrong. Note [Pages of our own] is in
// lagom/data/decoders/page_decoder.py.
class Pages {
  public:
    struct Kind {
        bool is_snappy;
        bool is_optional;    // values have a definition level, which is to be 1
        bool is_bytes;       // BYTE_ARRAY: each value begins with its length
        std::string prefix;  // of each value, which is left out
        size_t size;         // of a value without prefix, in bytes
        uint64_t count;      // of values in the column's part of the row group
        uint64_t most;       // bytes of a page, decompressed
    };
    enum class Status { done = 0, starved = 1, unusual = 2 };
    struct Step {
        size_t used;  // of the bytes that were given
        size_t rows;
        Status status;
        size_t wanted;  // of bytes behind these, where it is starved of them
    };

    // Where values go: `piece` of them side by side, the next ones `jump` bytes behind the first of these, and so on.
    struct Out {
        uint8_t* at;
        size_t piece;
        size_t jump;
    };

    // Another part of a column follows; memory is used again.
    void begin(Kind kind);

    // Decodes the next `rows` values into `out`, behind `done`, from bytes that begin where those that were used before ended.
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
    uint64_t left_ = 0;                 // values that have not been decoded
    std::vector<uint8_t> dictionary_;   // its values as they are stored
    size_t num_entries_ = 0;
    bool has_dictionary_ = false;
    std::vector<uint8_t> page_;         // decompressed, with room behind for reading 8 bytes at once
    size_t page_left_ = 0;              // values of the page that have not been taken
    bool is_indexed_ = false;
    const uint8_t* at_ = nullptr;       // in the page
    const uint8_t* end_ = nullptr;
    int bits_ = 0;                      // of an index
    size_t run_left_ = 0;               // indices of the run
    bool run_repeats_ = false;
    uint32_t run_value_ = 0;
    size_t run_bit_ = 0;                // of a packed run: where its next index begins, from at_
    const uint8_t* run_end_ = nullptr;
};

}  // namespace lagom
