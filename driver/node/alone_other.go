//go:build !linux

package node

func (s *recordStore) alone() {}
