package kube

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
)

// kinds are the known kinds. Objects of others are not looked at: a Secret never gets past Parse.
var kinds = []string{"PersistentVolume", "PersistentVolumeClaim", "VolumeAttachment", "CSINode",
	"Node", "Pod", "Event", "VolumeSnapshot", "VolumeSnapshotContent", "DaemonSet", "ReplicaSet",
	"Deployment"}

// errIncomplete does not quote the decoder, whose error contains values.
var errIncomplete = errors.New("is not the complete output of kubectl get -o json, or a field " +
	"has another type; repeat the command and keep all of its output")

// Parse parses the output of kubectl get -o json: one object, or a list. A list that is truncated,
// or one page of a longer one, is an error.
func Parse(data []byte) ([]Object, error) {
	var list struct {
		Kind     string `json:"kind"`
		Metadata struct {
			Continue           string `json:"continue"`
			RemainingItemCount int64  `json:"remainingItemCount"`
		} `json:"metadata"`
		Items []json.RawMessage `json:"items"`
	}
	// Data after the object is an error too: two concatenated lists are not one.
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, errIncomplete
	}
	element, isList := strings.CutSuffix(list.Kind, "List")
	switch {
	case !isList:
		o, err := parseObject(data, list.Kind)
		return []Object{o}, err
	case list.Metadata.Continue != "" || list.Metadata.RemainingItemCount > 0:
		return nil, errors.New("is one page of a longer list")
	case list.Items == nil:
		return nil, errors.New("is a list without items")
	}
	objects := make([]Object, 0, len(list.Items))
	for _, item := range list.Items {
		o, err := parseObject(item, element)
		if err != nil {
			return nil, err
		}
		objects = append(objects, o)
	}
	return objects, nil
}

// parseObject parses an object, which is of the given kind if it names none.
func parseObject(data []byte, kind string) (Object, error) {
	var o struct {
		Kind string `json:"kind"`
	}
	err := json.Unmarshal(data, &o)
	if o.Kind != "" {
		kind = o.Kind
	}
	known := Object{Kind: kind}
	if err == nil && slices.Contains(kinds, kind) {
		err = json.Unmarshal(data, &known)
		known.Kind = kind
	}
	if err != nil {
		return Object{}, errIncomplete
	}
	return known, nil
}
