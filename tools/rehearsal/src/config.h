// SPDX-License-Identifier: Apache-2.0
// What kind of card is simulated; read once from the environment.
#pragma once

#include <cstddef>
#include <string>

namespace rehearsal {

struct Config {
  std::string name;          // REHEARSAL_CARD_NAME
  int major = 0, minor = 0;  // REHEARSAL_CAPABILITY, as "9.0"
  int cards = 1;             // REHEARSAL_CARDS
  int multiprocessors = 0;   // REHEARSAL_MULTIPROCESSORS

  // Bytes. `memory` is what the card reports as its total.
  size_t memory = 0;        // REHEARSAL_MEMORY
  size_t reserved = 0;      // REHEARSAL_RESERVED: taken before we start
  size_t context = 0;       // REHEARSAL_CONTEXT: taken by a context
  size_t first_launch = 0;  // REHEARSAL_FIRST_LAUNCH: by the first kernel
  size_t communicator = 0;  // REHEARSAL_COMMUNICATOR: by each NCCL one
  size_t commit_limit = 0;  // REHEARSAL_COMMIT_LIMIT: host memory for contents

  std::string faults;  // REHEARSAL_FAULTS, "cuMemCreate:3,cuMemMap:1"
  std::string report;  // REHEARSAL_REPORT, a path; %p is the process id
};

// A value that cannot be read ends the process with a message: a rehearsal
// on a card that nobody asked for would be worse.
const Config& config();

// Changes the size of every card. Only before the first context exists.
bool resize_cards(size_t memory);

}  // namespace rehearsal
