#include "kvlink/handoff/block_table.hpp"

#include "kvlink/error.hpp"
#include "kvlink/plan/repeats.hpp"

namespace kvlink::handoff {

void check_block_table(std::span<const std::int32_t> table, std::uint32_t num_blocks, const std::string& called) {
  for (const std::int32_t block : table) {
    if (block < -1 || (block >= 0 && static_cast<std::uint32_t>(block) >= num_blocks)) {
      throw Error(Code::invalid_argument, called + ": block " + std::to_string(block) + " is outside [0, " +
                                              std::to_string(num_blocks) + "); -1 marks a hole");
    }
  }
  if (const auto repeat = plan::find_repeat(table)) {
    throw Error(Code::invalid_argument, called + ": block " + std::to_string(*repeat) + " appears twice");
  }
}

}  // namespace kvlink::handoff
