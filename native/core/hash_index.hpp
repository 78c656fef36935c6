// A hash table from 64-bit hashes to numbers that costs one cache miss a look-up: after a pass of the target model
// nothing is in the caches, and that is when drafters look things up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace esp {

// Open addressing, at most half full. The keys are hashes already.
template <typename Value> class HashIndex {
  public:
    void clear() {
        slots_.clear();
        size_ = 0;
    }

    std::size_t size() const { return size_; }

    // Starts loading what find and at will need: call it for several keys before the first of them is looked up.
    void prefetch(std::uint64_t key) const {
#if defined(__GNUC__)
        if (!slots_.empty()) {
            __builtin_prefetch(&slots_[place(key)]);
        }
#else
        (void)key;
#endif
    }

    // nullptr where the key is unknown.
    const Value *find(std::uint64_t key) const {
        if (slots_.empty()) {
            return nullptr;
        }
        const Slot &slot = slots_[locate(key)];
        return slot.used ? &slot.value : nullptr;
    }

    // The key's value, Value() where it is new. Valid until the next call.
    Value &at(std::uint64_t key) {
        if (2 * (size_ + 1) > slots_.size()) {
            grow();
        }
        Slot &slot = slots_[locate(key)];
        if (!slot.used) {
            slot = {key, Value(), true};
            ++size_;
        }
        return slot.value;
    }

    template <typename Unwanted> void erase_if(Unwanted unwanted) {
        std::vector<Slot> old(slots_.size());
        old.swap(slots_);
        size_ = 0;
        for (const Slot &slot : old) {
            if (slot.used && !unwanted(slot.value)) {
                at(slot.key) = slot.value;
            }
        }
    }

  private:
    struct Slot {
        std::uint64_t key = 0;
        Value value{};
        bool used = false;
    };
    static constexpr std::size_t first_size = 1U << 10;

    std::size_t place(std::uint64_t key) const { return static_cast<std::size_t>(key) & (slots_.size() - 1); }

    std::size_t locate(std::uint64_t key) const { // the key's slot, or the free one where it belongs
        std::size_t at = place(key);
        while (slots_[at].used && slots_[at].key != key) {
            at = (at + 1) & (slots_.size() - 1);
        }
        return at;
    }

    void grow() {
        std::vector<Slot> old(slots_.empty() ? first_size : 2 * slots_.size());
        old.swap(slots_);
        for (const Slot &slot : old) {
            if (slot.used) {
                slots_[locate(slot.key)] = slot;
            }
        }
    }

    std::vector<Slot> slots_; // a power of two
    std::size_t size_ = 0;
};

} // namespace esp
