package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// timeFormat is how a time is printed.
const timeFormat = time.RFC3339

// firstOf joins words, and counts those beyond a few.
func firstOf(words []string) string {
	const most = 8
	if len(words) <= most {
		return strings.Join(words, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(words[:most], ", "), len(words)-most)
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
