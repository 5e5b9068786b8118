//go:build !linux

package node

import "errors"

// Use needs Linux.
func (n *Service) Use() (Use, error) { return Use{}, errors.New("the node service needs Linux") }
